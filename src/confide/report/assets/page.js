"use strict";
/* Values under the pointer or the arrow keys, legends that hide lines, tables that sort and filter. No request is made. */
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const short = (v) => (v === 0 ? "0" : Math.abs(v) >= 1e-3 && Math.abs(v) < 1e6 ? String(+v.toPrecision(5)) : v.toExponential(3));
  const place = (v, [low, high, log, start, end]) => {
    const f = log ? Math.log10 : (x) => x;
    return start + ((end - start) * (f(v) - f(low))) / (f(high) - f(low));
  };

  function chart(figure) {
    const svg = figure.querySelector("svg"), holder = figure.querySelector("script[type='application/json']");
    if (!svg || !holder || figure.dataset.ready) return;
    figure.dataset.ready = "1";
    const data = JSON.parse(holder.textContent), off = new Set();
    const cursor = svg.appendChild(document.createElementNS(NS, "g"));
    cursor.setAttribute("display", "none");
    const rule = cursor.appendChild(document.createElementNS(NS, "line"));
    rule.setAttribute("class", "cursor");
    rule.setAttribute("y1", data.up[4]);
    rule.setAttribute("y2", data.up[3]);
    const dots = data.lines.map((line) => {
      const dot = cursor.appendChild(document.createElementNS(NS, "circle"));
      dot.setAttribute("class", "dot c" + line.colour);
      dot.setAttribute("r", 4);
      return dot;
    });
    const tip = figure.appendChild(document.createElement("div"));
    tip.className = "tip";
    tip.hidden = true;
    tip.setAttribute("role", "status");
    const stops = [...new Set(data.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    let here = stops.length - 1;

    function show(index) {
      here = Math.max(0, Math.min(stops.length - 1, index));
      const x = stops[here], at = place(x, data.across);
      rule.setAttribute("x1", at);
      rule.setAttribute("x2", at);
      const rows = [];
      data.lines.forEach((line, i) => {
        let best = 0;
        line.x.forEach((v, j) => { if (Math.abs(v - x) < Math.abs(line.x[best] - x)) best = j; });
        const seen = !off.has(i);
        dots[i].setAttribute("display", seen ? "" : "none");
        if (!seen) return;
        dots[i].setAttribute("cx", place(line.x[best], data.across));
        dots[i].setAttribute("cy", place(line.y[best], data.up));
        rows.push([line, line.y[best]]);
      });
      tip.replaceChildren(document.createTextNode(data.x + " " + short(x)));
      for (const [line, y] of rows) {
        const row = document.createElement("div"), key = document.createElement("i");
        key.className = "c" + line.colour;
        row.append(key, (data.lines.length > 1 ? line.label + ": " : "") + short(y));
        tip.append(row);
      }
      cursor.removeAttribute("display");
      tip.hidden = false;
      const box = svg.getBoundingClientRect(), outer = figure.getBoundingClientRect();
      const left = box.left - outer.left + (at / svg.viewBox.baseVal.width) * box.width;
      const width = tip.offsetWidth;
      tip.style.left = Math.max(4, Math.min(outer.width - width - 4, left > outer.width / 2 ? left - width - 10 : left + 10)) + "px";
      tip.style.top = box.top - outer.top + 8 + "px";
    }
    function hide() { cursor.setAttribute("display", "none"); tip.hidden = true; }
    function nearest(event) {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      let best = 0, gap = Infinity;
      stops.forEach((v, i) => { const d = Math.abs(place(v, data.across) - x); if (d < gap) { gap = d; best = i; } });
      return best;
    }
    svg.addEventListener("pointermove", (event) => show(nearest(event)));
    svg.addEventListener("pointerdown", (event) => show(nearest(event)));
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const jump = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: stops.length - 1 }[event.key];
      if (event.key === "Escape") hide();
      if (jump === undefined) return;
      event.preventDefault();
      show(jump);
    });
    for (const key of figure.querySelectorAll(".key")) {
      key.addEventListener("click", () => {
        const i = Number(key.dataset.series), seen = key.getAttribute("aria-pressed") === "true";
        key.setAttribute("aria-pressed", String(!seen));
        if (seen) off.add(i); else off.delete(i);
        svg.querySelector(`.series[data-series="${i}"]`).classList.toggle("off", seen);
        hide();
      });
    }
  }

  function table(element) {
    if (element.dataset.ready) return;
    element.dataset.ready = "1";
    const body = element.tBodies[0], heads = [...element.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button")?.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const value = (row) => { const cell = row.cells[column]; return cell.dataset.v !== undefined ? Number(cell.dataset.v) : cell.textContent; };
        const rows = [...body.rows].sort((a, b) => {
          const p = value(a), q = value(b);
          const order = typeof p === "number" ? p - q : p.localeCompare(q, undefined, { numeric: true });
          return up ? order : -order;
        });
        body.append(...rows);
      });
    });
    const filter = element.closest("section")?.querySelector("input[type=search]");
    filter?.addEventListener("input", () => {
      const wanted = filter.value.toLowerCase();
      for (const row of body.rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
    });
  }

  function copies(button) {
    button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.copy).textContent;
      try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Press Ctrl-C"; getSelection().selectAllChildren(document.getElementById(button.dataset.copy)); }
    });
  }

  function enliven(root) {
    root.querySelectorAll("figure.chart").forEach(chart);
    root.querySelectorAll("table.sortable").forEach(table);
    root.querySelectorAll("button[data-copy]").forEach(copies);
  }
  window.confide = { enliven };
  enliven(document);
})();
