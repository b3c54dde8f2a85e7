"use strict";
// Draws the chosen map from the data in the page. All text goes in as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const view = document.getElementById("view");
  if (!view || !data.maps.length) return;
  const [which, every, grid, panel] = ["which", "every", "grid", "cell"].map((id) => document.getElementById(id));
  const [pages, range, earlier, later] = ["pages", "range", "earlier", "later"].map((id) => document.getElementById(id));
  const MOST_FIELDS = 12000; // drawn at once: what a browser lays out without a pause
  const EQUAL = 0;
  const box = grid.parentElement;
  let map, lines, start, size, current;

  const element = (name, content, kind) => {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    if (content instanceof Array) made.append(...content);
    else if (content !== undefined) made.append(String(content));
    return made;
  };
  const state = (row, site) => map.patterns[map.rows[row][4]].charCodeAt(site) - 97;
  const differs = (number) => number > EQUAL && number <= data.different;

  // Sites as lines: neighbours of equal states, none of which differs, are drawn together.
  function group() {
    const sizes = every.checked ? map.sites.map(() => 1) : map.lines;
    let from = 0;
    lines = sizes.map((number) => ({ from, to: (from += number) - 1 }));
    size = Math.max(16, Math.min(128, Math.floor(MOST_FIELDS / lines.length)));
  }

  const name = (line) => {
    const [first, last] = [line.from, line.to].map((site) => data.sites[map.sites[site]]);
    if (line.from === line.to) return [first[0], first[1]];
    const number = line.to - line.from + 1;
    return [`${number} sites: ${first[0]} … ${last[0]}`, `${number} sites, ${first[1]} … ${last[1]}`];
  };

  function choose(number) {
    map = data.maps[number];
    document.getElementById("notes").replaceChildren(...map.notes.map((note) => element("p", note, "note")));
    group();
    const first = map.cells.length ? map.cells[0] : [0, map.sites[0]];
    start = Math.floor(first[0] / size) * size;
    const site = map.sites.indexOf(first[1]);
    current = { row: first[0], line: lines.findIndex((line) => line.from <= site && site <= line.to) };
    draw();
    show();
    box.scrollLeft = Math.max(0, field().offsetLeft + 3 * field().offsetWidth - box.clientWidth); // if need be
    box.scrollTop = Math.max(0, field().offsetTop - box.clientHeight / 2);
  }

  function header(end) {
    const draft = map.rows[0][2].startsWith("draft-");
    const kinds = element("tr", [element("td", draft ? "draft step" : "kind of row")]);
    for (let row = start, run; row < end; row = run) {
      const kind = map.rows[row][2];
      for (run = row; run < end && map.rows[run][2] === kind; run++);
      const cell = element("th", kind.replace(/^(draft|verify)-/, ""), "kind"); // short: a column is narrow
      cell.colSpan = run - row;
      cell.scope = "colgroup";
      cell.title = kind;
      kinds.append(cell);
    }
    const positions = element("tr", [element("td", "position")]);
    for (let row = start; row < end; row++) {
      const cell = element("th", [element("span", map.rows[row][0])]);
      cell.scope = "col";
      positions.append(cell);
    }
    return element("thead", [kinds, positions]);
  }

  function draw() {
    const end = Math.min(map.rows.length, start + size);
    const body = lines.map((line, index) => {
      const made = element("tr", undefined, data.sites[map.sites[line.from]][2] ? "layer" : "");
      const [long, short] = name(line);
      const title = element("th", [element("span", long, "long"), element("span", short, "short")]);
      title.scope = "row";
      title.title = long;
      made.append(title);
      for (let row = start; row < end; row++) {
        const number = state(row, line.from);
        const cell = element("td", data.states[number][1], `s s${number} n${number}`);
        cell.setAttribute("aria-label", data.states[number][0]);
        cell.tabIndex = -1;
        cell.dataset.at = `${index} ${row}`;
        made.append(cell);
      }
      return made;
    });
    grid.replaceChildren(header(end), element("tbody", body));
    pages.hidden = map.rows.length <= size;
    range.textContent = `rows ${start + 1} to ${end} of ${map.rows.length}`;
    earlier.disabled = start === 0;
    later.disabled = end === map.rows.length;
    current.row = Math.max(start, Math.min(end - 1, current.row));
    // A field that takes the focus must not hide behind names and positions, which stay where they are.
    box.style.scrollPaddingLeft = `${grid.querySelector("tbody th").offsetWidth}px`;
    box.style.scrollPaddingTop = `${grid.tHead.offsetHeight}px`;
    mark();
  }

  const field = () => grid.querySelector(`[data-at="${current.line} ${current.row}"]`);

  function mark() {
    for (const old of grid.querySelectorAll('[tabindex="0"]')) old.tabIndex = -1;
    field().tabIndex = 0;
  }

  function move(line, row) {
    current = { line: Math.max(0, Math.min(lines.length - 1, line)), row: Math.max(0, Math.min(map.rows.length - 1, row)) };
    if (current.row < start || current.row >= start + size) {
      start = Math.floor(current.row / size) * size;
      draw();
    }
    mark();
    field().focus();
  }

  const list = (pairs) => element("dl", pairs.flatMap(([term, value]) => [element("dt", term), element("dd", value)]));

  function show() {
    for (const old of grid.querySelectorAll('[aria-selected="true"]')) old.removeAttribute("aria-selected");
    field().setAttribute("aria-selected", "true");
    const line = lines[current.line];
    const [position, step, kind, parent] = map.rows[current.row];
    const number = state(current.row, line.from);
    const where = [["request", map.request], ["position", position], ["step", `${step}, ${kind}`]];
    const other = data.sides[1];
    if (!parent) where.push([other, "no counterpart of this row: not compared"]);
    else if (parent[0] !== map.request || parent[1] !== step) where.push([other, `request ${parent[0]}, step ${parent[1]}`]);
    where.push(["state", data.states[number][0]]);
    const parts = [list(where)];
    const found = map.cells.find((cell) => cell[0] === current.row && cell[1] === map.sites[line.from]);
    if (differs(number)) parts.push(...numbers(found && found.slice(2)));
    panel.replaceChildren(element("h3", name(line)[0]), element("div", parts, "parts"));
  }

  function numbers(found) {
    if (!found) return [element("p", "Not described here: the report keeps the numbers of the causally first cells.")];
    if (!found.length) return [element("p", "How much it differs is not known: the row was not kept on both sides, or has another layout.")];
    const [sizes, first, ...sides] = found;
    const rows = sides.map(([decimal, hex], side) => {
      const title = element("th", data.sides[side]);
      title.scope = "row";
      return element("tr", [title, element("td", [element("code", decimal)]), element("td", [element("code", hex)])]);
    });
    const caption = element("caption", `first differing element${first && ` at ${first}`}`);
    return [list(Object.entries(sizes)), element("table", [caption, element("tbody", rows)])];
  }

  grid.addEventListener("click", (event) => {
    const cell = event.target.closest("td[data-at]");
    if (!cell) return;
    move(...cell.dataset.at.split(" ").map(Number));
    show();
  });
  grid.addEventListener("keydown", (event) => {
    const { line, row } = current;
    const last = Math.min(map.rows.length, start + size) - 1;
    const moves = {
      ArrowUp: [line - 1, row], ArrowDown: [line + 1, row], ArrowLeft: [line, row - 1], ArrowRight: [line, row + 1],
      Home: [event.ctrlKey ? 0 : line, event.ctrlKey ? 0 : start],
      End: [event.ctrlKey ? lines.length - 1 : line, event.ctrlKey ? map.rows.length - 1 : last],
      PageUp: [line, row - size], PageDown: [line, row + size],
    };
    if (event.key === "Enter" || event.key === " ") show();
    else if (moves[event.key]) move(...moves[event.key]);
    else return;
    event.preventDefault();
  });
  which.addEventListener("change", () => choose(Number(which.value)));
  every.addEventListener("change", () => {
    const site = lines[current.line].from;
    group();
    start = Math.floor(current.row / size) * size;
    current.line = lines.findIndex((line) => line.from <= site && site <= line.to);
    draw();
    show();
  });
  for (const [button, by] of [[earlier, -1], [later, 1]]) {
    button.addEventListener("click", () => {
      start = Math.max(0, start + by * size);
      draw();
      show();
    });
  }
  view.hidden = false;
  choose(0);
})();
