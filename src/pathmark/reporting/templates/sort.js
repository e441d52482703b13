// Sorts a table by the column whose heading is pressed; without scripts the table stays as it is.
for (const button of document.querySelectorAll("table.sortable th button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th"), table = heading.closest("table"), body = table.tBodies[0];
    const rising = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.querySelectorAll("th")) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const value = row => row.cells[heading.cellIndex].dataset.value ?? row.cells[heading.cellIndex].textContent.trim();
    const compare = (a, b) => {
      const first = value(a), second = value(b);
      if (first === "" || second === "") return (first === "") - (second === "");  // what is missing stays last
      const order = isNaN(first) || isNaN(second) ? first.localeCompare(second) : first - second;
      return rising ? order : -order;
    };
    body.append(...[...body.rows].sort(compare));
  });
}
