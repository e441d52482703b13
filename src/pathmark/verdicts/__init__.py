"""What every verdict is, whatever mark was looked for: a p-value, who may rely on it, and the words for it.

`Verdict` is the core that paths, replies and rival schemes share; `Criteria` say what decides; `Anchor` says whether a
third party may take the p-value at face value; `wording` has every sentence.
"""

from pathmark.verdicts.claims import Anchor, judge_anchor
from pathmark.verdicts.criteria import Criteria
from pathmark.verdicts.verdict import Verdict

__all__ = ["Anchor", "Criteria", "Verdict", "judge_anchor"]
