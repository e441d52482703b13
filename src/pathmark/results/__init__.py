"""What experiments leave behind: frozen, versioned result types, and files that say what was measured, with what.

`header` names a measurement and reads and writes its file, `schema` turns typed results into JSON and back,
`robustness` has the rows of a robustness run. Tables and plots are made from such files alone.
"""

from pathmark.results.header import Header, pooled, read_result, write_result
from pathmark.results.robustness import RobustnessResult, read_robustness

__all__ = ["Header", "RobustnessResult", "pooled", "read_result", "read_robustness", "write_result"]
