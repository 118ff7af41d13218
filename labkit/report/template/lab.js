/* What a page does beyond showing itself; without it everything is still there.

`table.lab` of more than six rows: sort by a heading, filter, link, CSV. A cell's number is its `data-v`, else its text.
A row with ratio, low and high (columns, or given as `data-runs`) is told in a card; so is a term's `title`.
data-markdown="…" on any element: a button copies this text. Permalinks: figures with an id, rows "claim-…",
[data-markdown] with an id. #id?column=value&search=words&sort=column&down=1 shows a table so. */
"use strict";
(() => {
  const COUNTS = /^(batch|slots|draft|prefill|tokens|[TNK]|BV|rows|warps|step|parts)$/; // to choose by
  const FEW = 12, LONG = 48, ROWS = 6, ANY = "\n";
  const all = selector => [...document.querySelectorAll(selector)];
  const textOf = element => element.textContent.replace(/\s+/g, " ").trim();
  const missing = text => ["", "—", "–"].includes(text);
  const make = (tag, given = {}, ...parts) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
    made.append(...parts);
    return made;
  };
  const button = (text, act) => {
    const made = make("button", { type: "button" }, text);
    made.onclick = () => act(made);
    return made;
  };
  const number = cell => { // of "1,234", "×1.29", "−3.1 %"; null where a text is none
    const text = (cell.dataset.v ?? textOf(cell)).replace(/,(?=\d{3})/g, "").replace("−", "-");
    const found = /^×?([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?: ?[%×])?$/.exec(text);
    return found && Number(found[1]);
  };

  const copyOld = text => { // where the clipboard is refused
    const area = make("textarea", { class: "lab-away" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  const copy = async (text, from) => {
    const said = from.textContent;
    const done = await navigator.clipboard?.writeText(text).then(() => true, () => false) || copyOld(text);
    from.focus();
    from.textContent = done ? "Copied" : "Not copied";
    setTimeout(() => { from.textContent = said; }, 1500);
  };

  // Tables
  const views = new Map();
  const headsOf = table => [...table.tHead.rows[0].cells];

  const live = (table, place) => {
    const body = table.tBodies[0], rows = [...body.rows], heads = headsOf(table), names = heads.map(textOf);
    const figure = table.closest("figure[id]"), caption = figure?.querySelector("figcaption");
    const title = caption ? textOf(caption) : `Table ${place + 1}`;
    const { id } = figure ?? Object.assign(table, { id: table.id || `table-${place + 1}` });
    const columns = names.map((name, at) => {
      const texts = rows.map(row => textOf(row.cells[at])), numbers = rows.map(row => number(row.cells[at]));
      const numeric = texts.every((text, row) => numbers[row] !== null || missing(text));
      const values = [...new Set(texts)];
      if (numeric) values.sort((one, two) => numbers[texts.indexOf(one)] - numbers[texts.indexOf(two)]);
      const few = values.length > 1 && rows[values.length] && values.length <= FEW && values.every(text => text.length <= LONG && !/^[\d.]+ /.test(text));
      return { name, texts, numbers, numeric, values, chosen: few && (!numeric || COUNTS.test(name)) };
    });
    let sorted = -1, down = false;
    const selects = columns.filter(column => column.chosen).map(column => {
      const options = column.values.map(text => make("option", { value: text }, text || "(none)"));
      const select = make("select", {}, make("option", { value: ANY }, "all"), ...options);
      return { ...column, select, label: make("label", {}, `${column.name} `, select) };
    });
    const search = make("input", { type: "search", placeholder: "Filter", "aria-label": "Filter rows" });
    const count = make("output");

    const kept = row => {
      const words = search.value.toLowerCase().split(/\s+/), text = rows[row].textContent.toLowerCase();
      return selects.every(({ select, texts }) => select.value === ANY || texts[row] === select.value) &&
        words.every(word => text.includes(word));
    };
    const ordered = ({ texts, numbers, numeric }) => [...rows.keys()].sort((one, two) =>
      missing(texts[one]) - missing(texts[two]) || // last either way
      (down ? -1 : 1) * (numeric ? numbers[one] - numbers[two] : texts[one].localeCompare(texts[two])) || one - two);
    const apply = () => {
      const places = sorted < 0 ? [...rows.keys()] : ordered(columns[sorted]), shown = places.filter(kept);
      rows.forEach((row, place) => {
        row.hidden = !shown.includes(place);
        row.removeAttribute("tabindex");
      });
      body.append(...places.map(place => rows[place]));
      if (shown.length && told(rows[shown[0]])) rows[shown[0]].tabIndex = 0;
      heads.forEach((head, at) => {
        head.removeAttribute("aria-sort");
        if (at === sorted) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      });
      count.textContent = shown.length < rows.length ? `${shown.length} of ${rows.length} rows` : `${rows.length} rows`;
    };
    const sort = at => { // up, down, as it was
      [sorted, down] = sorted !== at ? [at, false] : down ? [-1, false] : [at, true];
      apply();
    };
    const share = from => {
      const query = new URLSearchParams(selects.flatMap(({ name, select }) =>
        select.value === ANY ? [] : [[name, select.value]]));
      if (search.value) query.set("search", search.value);
      if (sorted >= 0) query.set("sort", names[sorted]);
      if (down) query.set("down", 1);
      history.replaceState(null, "", `#${encodeURIComponent(id)}${String(query) && `?${query}`}`);
      copy(location.href, from);
    };
    const save = () => {
      const field = value => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
      const lines = [...body.rows].filter(row => !row.hidden)
        .map(row => [...row.cells].map(cell => field(String(number(cell) ?? textOf(cell)))).join(","));
      const blob = new Blob([[names.map(field).join(","), ...lines, ""].join("\r\n")], { type: "text/csv" });
      const link = make("a", { href: URL.createObjectURL(blob), download: `${id}.csv` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    };
    views.set(table, query => {
      for (const { name, select, values } of selects) {
        select.value = values.includes(query.get(name)) ? query.get(name) : ANY;
      }
      search.value = query.get("search") ?? "";
      [sorted, down] = [names.indexOf(query.get("sort")), query.get("down") === "1"];
      apply();
    });
    heads.forEach((head, at) =>
      head.replaceChildren(button(names[at] || "column", () => sort(at))));
    const controls = make("div", { class: "lab-controls", role: "group", "aria-label": `Rows: ${title}` },
      ...selects.map(one => one.label), search, button("CSV", save), button("Copy link", share), count);
    controls.oninput = apply;
    (table.closest(".lab-scroll") || table).before(controls);
    apply();
  };

  // The card
  const card = make("div", { id: "lab-card", role: "tooltip", hidden: "" });
  let about = null;
  const hide = () => {
    card.hidden = true;
    about?.removeAttribute("aria-describedby");
    about = null;
  };
  const told = row => { // lines, or null where the row has no ratio
    const names = headsOf(row.closest("table")).map(textOf), { cells, dataset } = row;
    const value = name => Number(dataset[name]) || (names.includes(name) ? number(cells[names.indexOf(name)]) : null);
    const [ratio, low, high, noise, runs, samples] = ["ratio", "low", "high", "noise", "runs", "samples"].map(value);
    if (!(ratio > 0 && low !== null && high !== null)) return null;
    const words = ratio < 1 ? `${(1 / ratio).toFixed(2)}× slower` : `${ratio.toFixed(2)}× faster`;
    const behind = [
      samples && `${samples} samples`, runs && `${runs} process${runs === 1 ? "" : "es"}`,
      noise !== null && `A/A noise ±${(100 * noise).toFixed(2)} %`,
    ].filter(Boolean).join(" · ");
    return [words, `ratio ${ratio.toFixed(3)}, 95 % interval ${low.toFixed(3)} to ${high.toFixed(3)}`, behind];
  };
  const show = (target, left) => {
    if (target === about) return;
    hide();
    const row = target.matches("tr"), lines = row ? told(target) : [target.dataset.means];
    if (!lines) return;
    card.replaceChildren(...lines.filter(Boolean).map(line => make("p", {}, line)));
    card.classList.toggle("lab-through", row); // the pointer reaches the row below
    card.hidden = false;
    const box = target.getBoundingClientRect(), most = document.documentElement.clientWidth - card.offsetWidth - 8;
    const above = box.bottom + card.offsetHeight > innerHeight && box.top > card.offsetHeight;
    card.style.left = `${scrollX + Math.max(8, Math.min(left || box.left, most))}px`;
    card.style.top = `${scrollY + (above ? box.top - card.offsetHeight : box.bottom)}px`;
    target.setAttribute("aria-describedby", card.id);
    about = target;
  };
  const ROW = "table.lab tbody tr", TOLD = `dfn.term, ${ROW}`;
  document.addEventListener("mouseover", ({ target, clientX }) => {
    const found = target.closest(TOLD);
    if (found) show(found, found.matches("tr") && clientX + 12);
    else if (!card.contains(target)) hide();
  });
  document.addEventListener("focusin", ({ target }) => (target.matches(TOLD) ? show(target) : hide()));
  document.addEventListener("keydown", event => {
    if (event.key === "Escape") hide();
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    let row = step && event.target.matches(ROW) && event.target[step];
    while (row?.hidden) row = row[step];
    if (!row) return;
    event.preventDefault();
    event.target.removeAttribute("tabindex"); // one row of a table is a tab stop
    row.tabIndex = 0;
    row.focus();
  });

  // Addresses
  const go = () => {
    const [name, query] = location.hash.slice(1).split(/\?(.*)/s);
    let target = null;
    try { target = document.getElementById(decodeURIComponent(name)); } catch { /* not ours */ }
    if (!target) return;
    const table = query && (target.matches("table") ? target : target.querySelector("table.lab"));
    views.get(table)?.(new URLSearchParams(query));
    for (let part = table || target; part; part = part.parentElement) if (part.matches("details")) part.open = true;
    target.scrollIntoView();
  };

  // The page
  document.body.append(card);
  for (const term of all("dfn.term")) {
    term.dataset.means = term.title;
    term.removeAttribute("title");
  }
  all("table.lab").filter(table => table.tHead && table.tBodies[0]?.rows.length).forEach((table, place) => {
    const { rows } = table.tBodies[0];
    if (rows.length > ROWS) live(table, place);
    else if (told(rows[0])) rows[0].tabIndex = 0;
  });
  for (const item of all("figure[id], tr[id^='claim-'], [data-markdown][id]")) {
    const place = item.querySelector("figcaption") || (item.matches("tr") ? item.cells[0] : item);
    const what = item.matches("figure") ? "figure" : "claim", href = `#${encodeURIComponent(item.id)}`;
    place.append(" ", make("a", { class: "permalink", href, "aria-label": `Link to this ${what}` }, "#"));
  }
  for (const item of all("[data-markdown]")) {
    const place = item.matches("tr") ? item.lastElementChild : item;
    place.append(button("Copy as Markdown", from => copy(item.dataset.markdown, from)));
  }
  const folds = all("main details"), [head] = all("main :is(h1, .contents, #claims)").slice(-1);
  if (folds[1]) {
    head?.after(make("div", { class: "lab-controls" }, button("Expand all", from => {
      const open = from.textContent === "Expand all";
      for (const fold of folds) fold.open = open;
      from.textContent = open ? "Fold all" : "Expand all";
    })));
  }
  addEventListener("hashchange", go);
  go();
})();
