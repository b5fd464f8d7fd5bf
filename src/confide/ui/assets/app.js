"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const make = (name, props = {}, ...inside) => { const e = Object.assign(document.createElement(name), props); e.append(...inside); return e; };
  const number = (v) => (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e15 ? v.toLocaleString("en", { maximumSignificantDigits: 4 }) : v.toExponential(2));

  async function ask(path, given, options = {}) {
    const query = given ? "?" + new URLSearchParams(given) : "";
    const answer = await fetch(path + query, { cache: "no-store", ...options });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error || answer.statusText);
    return found;
  }

  /* ---- views ---- */
  const views = ["planner", "runs", "try"];
  function go() {
    const wanted = location.hash.slice(1), view = views.includes(wanted) ? wanted : "planner";
    for (const name of views) $("view-" + name).hidden = name !== view;
    for (const link of document.querySelectorAll(".top nav a")) {
      if (link.hash === "#" + view) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
    }
    document.body.dataset.view = view;
    document.title = { planner: "Planner", runs: "Runs", try: "Try it" }[view] + " · Confide";
    if (view !== "planner") refresh();
  }
  addEventListener("hashchange", () => { if (location.hash !== "#main") { go(); $("main").focus({ preventScroll: true }); scrollTo(0, 0); } });

  /* ---- planner: sliders move in even steps of the logarithm, so that values come again and are known already ---- */
  const settings = [
    { name: "population", label: "Population: users who may be drawn", low: 2, high: 10, steps: 20, value: 1e6, whole: true },
    { name: "cohort", label: "Cohort: users in a round, on average", low: 0, high: 6, steps: 20, value: 1000, whole: true },
    { name: "noise_multiplier", label: "Noise multiplier z: noise on the sum, in units of one user's largest part", low: -2, high: 2, steps: 20, value: 1 },
    { name: "rounds", label: "Rounds: central steps", low: 0, high: 5, steps: 20, value: 1000, whole: true },
    { name: "delta", label: "Delta: at most 1 / population is wise", low: -12, high: -3, steps: 2, value: 1e-7 },
  ];
  const tidy = (v, whole) => (whole ? Math.round(v < 1000 ? v : +v.toPrecision(3)) : +v.toPrecision(3));
  let turn = 0, controller = null, chosen = null, presets = [];

  for (const s of settings) {
    const range = make("input", { type: "range", id: "r-" + s.name, min: s.low * s.steps, max: s.high * s.steps, step: 1 });
    const exact = make("input", { type: "text", id: "n-" + s.name, inputMode: "decimal" });
    exact.setAttribute("aria-label", s.name.replace("_", " ") + ", exact value");
    s.range = range;
    s.exact = exact;
    s.set = (value) => {
      s.value = s.whole ? Math.round(value) : value;
      exact.value = String(s.value);
      range.value = Math.round(Math.log10(s.value) * s.steps);
      range.setAttribute("aria-valuetext", number(s.value));
    };
    s.set(s.value);
    range.addEventListener("input", () => { const before = s.value; s.set(tidy(10 ** (range.value / s.steps), s.whole)); moved(s, before); });
    exact.addEventListener("change", () => {
      const before = s.value, typed = Number(exact.value.replaceAll(",", ""));
      if (Number.isFinite(typed) && typed > 0) { s.set(typed); moved(s, before); } else exact.value = String(s.value);
    });
    $("sliders").append(make("div", { className: "slider" }, make("label", { htmlFor: range.id }, s.label), range, exact));
  }
  const by = Object.fromEntries(settings.map((s) => [s.name, s]));

  function moved(s, before) {
    if (s.name === "cohort" && $("hold").checked) by.noise_multiplier.set(+((by.noise_multiplier.value * s.value) / before).toPrecision(4));
    chosen = null;
    $("presets").value = "";
    plan();
  }
  let waiting = null;
  function plan() {
    clearTimeout(waiting);
    waiting = setTimeout(answer, 60);
  }
  async function answer() {
    const mine = ++turn;
    controller?.abort();
    controller = new AbortController();
    const signal = controller.signal, given = Object.fromEntries(settings.map((s) => [s.name, s.value]));
    given.hold = $("hold").checked ? "s" : "z";
    $("per-user").textContent = `s = ${number(by.noise_multiplier.value / by.cohort.value)} per user, rate ${number(by.cohort.value / by.population.value)}`;
    $("published").textContent = chosen ? `PFL-ASR prints ${chosen.published}${chosen.note ? "; " + chosen.note : ""}.` : "";
    $("epsilon").classList.add("busy");
    $("lines").textContent = lines();
    const began = performance.now();
    try {
      const found = await ask("api/plan", given, { signal });
      if (mine !== turn) return;
      $("epsilon").textContent = found.epsilon === null ? "none" : found.shown;
      $("epsilon").className = "big " + found.strength;
      $("protection").textContent = found.protection[0].toUpperCase() + found.protection.slice(1);
      $("protection").className = found.strength;
      $("meaning").textContent = found.meaning;
      $("warnings").replaceChildren(...found.warnings.map((w) => make("li", {}, w)));
      $("timing").textContent = `answered in ${Math.round(performance.now() - began)} ms; ${found.sampler} sampling, ${found.adjacency}`;
      $("rdp").textContent = "";
      $("enough").textContent = "";
      for (const axis of ["rounds", "noise_multiplier", "cohort", "population"]) {
        const drawn = await ask("api/plan/curve", { ...given, axis }, { signal });
        if (mine !== turn) return;
        let place = $("curve-" + axis);
        if (!place) $("curves").append((place = make("div", { id: "curve-" + axis })));
        place.innerHTML = drawn.svg;
        confide.enliven(place);
      }
      const enough = await ask("api/plan/enough", given, { signal });
      if (mine === turn) $("enough").textContent = enough.said;
      const rdp = await ask("api/plan/rdp", given, { signal });
      if (mine === turn) $("rdp").textContent = `by RDP: ${rdp.epsilon === null ? "none" : rdp.shown}`;
    } catch (error) {
      if (error.name === "AbortError" || mine !== turn) return;
      $("epsilon").textContent = "–";
      $("epsilon").className = "big error";
      $("protection").textContent = "";
      $("meaning").textContent = error.message;
      $("warnings").replaceChildren();
    }
  }
  const lines = () => [
    `sampling: {kind: poisson, cohort: ${by.cohort.value}}  # of ${number(by.population.value)}`,
    "privacy:", "  mechanism: gaussian", `  noise_multiplier: ${by.noise_multiplier.value}`, `  delta: ${by.delta.value}`,
    `run: {steps: ${by.rounds.value}}`].join("\n");
  $("hold").addEventListener("change", plan);
  $("solve").addEventListener("click", async () => {
    const what = $("solve-for").value;
    const given = { ...Object.fromEntries(settings.map((s) => [s.name, s.value])), target: $("target").value, for: what, hold: $("hold").checked ? "s" : "z" };
    $("solve-said").className = "soft";
    $("solve-said").textContent = "Looking…";
    try {
      const found = await ask("api/plan/solve", given);
      for (const s of settings) s.set(found[s.name]);
      chosen = null;
      $("presets").value = "";
      $("solve-said").textContent = `${what.replace("_", " ")}: ${number(found[what])}`;
      plan();
    } catch (error) { $("solve-said").className = "error"; $("solve-said").textContent = error.message; }
  });
  $("plan").addEventListener("submit", (event) => event.preventDefault());
  $("presets").addEventListener("change", () => {
    chosen = presets[$("presets").value] || null;
    if (!chosen) return;
    for (const s of settings) s.set(chosen[s.name]);
    plan();
  });
  async function fillPresets() {
    presets = await ask("api/presets");
    presets.forEach((p, i) => $("presets").append(make("option", { value: i }, `σ ${p.sigma}e-6, S ${number(p.cohort)}, K ${number(p.population)}: published ε ${p.published}`)));
  }

  /* ---- runs ---- */
  const picked = new Set();
  let timer = null, known = [], drawn = "", asked = 0;
  async function refresh() {
    clearTimeout(timer);
    const mine = ++asked;
    let running = false;
    try {
      const found = await ask("api/runs", null, { signal: AbortSignal.timeout(10000) }); // a lost answer must not end the looking
      if (mine !== asked) return; // a later question is under way, and will go on asking
      known = found.runs;
      running = known.some((run) => run.state === "running");
      $("folder").textContent = "in " + found.folder;
      if (JSON.stringify(known) !== drawn) draw(); // rows that stay can be clicked at any time
      drawn = JSON.stringify(known);
      for (const task of ["speech", "retrieval"]) choices(task);
    } catch (error) { $("runs-said").textContent = error.message; drawn = ""; }
    if (mine === asked && !$("view-runs").hidden) timer = setTimeout(refresh, running ? 1500 : 6000);
  }
  const heads = [...$("runs").tHead.rows[0].cells], titles = heads.map((head) => head.textContent);
  let order = null, upwards = true;
  function listed() {
    const wanted = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => [run.name, run.recipe, run.task, run.rule, run.state].join(" ").toLowerCase();
    const rows = known.filter((run) => wanted.every((word) => text(run).includes(word)));
    if (!order) return rows;
    const value = (run) => (order === "step" ? (run.step || 0) / (run.steps || 1) : run[order]);
    return rows.sort((a, b) => {
      const p = value(a) ?? null, q = value(b) ?? null;
      if (p === null || q === null) return p === q ? 0 : p === null ? 1 : -1; // what is not known comes last
      return (upwards ? 1 : -1) * (typeof p === "number" && typeof q === "number" ? p - q : String(p).localeCompare(String(q), "en", { numeric: true }));
    });
  }
  for (const head of heads) {
    head.querySelector("button")?.addEventListener("click", (event) => {
      const key = event.currentTarget.dataset.key;
      upwards = order === key ? !upwards : true;
      order = key;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", upwards ? "ascending" : "descending");
      draw();
    });
  }
  $("find").addEventListener("input", draw);
  function draw() {
    const body = $("runs").tBodies[0], focused = document.activeElement?.dataset?.run;
    $("runs-said").textContent = known.length ? "" : "No run yet: confide train convex/digits --out runs/first";
    body.replaceChildren(...listed().map((run) => {
      const box = make("input", { type: "checkbox", checked: picked.has(run.name), disabled: run.state !== "finished" });
      box.setAttribute("aria-label", "choose " + run.name);
      box.dataset.run = run.name;
      box.addEventListener("change", () => { if (box.checked) picked.add(run.name); else picked.delete(run.name); $("compare").disabled = picked.size < 2; });
      const link = make("a", { href: "report?" + new URLSearchParams({ run: run.name }) }, run.name);
      const bar = make("progress", { max: run.steps || 1, value: run.step || 0 });
      bar.setAttribute("aria-label", "progress of " + run.name);
      const left = run.state === "running" && run.seconds_left !== null ? [make("div", {}, `about ${duration(run.seconds_left)} left`)] : [];
      const where = run.state === "damaged" ? [run.said] : [make("div", {}, bar, make("div", {}, `${number(run.step)} of ${number(run.steps)}`), ...left)];
      const metric = run.value === null || run.value === undefined ? "" : run.metric_said.endsWith(", %") ? `${run.metric_said.slice(0, -3)} ${number(run.value)}\u00a0%` : `${run.metric_said} ${number(run.value)}`;
      const epsilon = !run.step ? "" : run.epsilon === null ? make("span", { className: "none" }, "no guarantee") : make("span", { className: run.strength, title: run.protection }, `${run.epsilon_shown} ${run.strength}`);
      const large = run.delta && run.population && run.delta * run.population > 1;
      const delta = run.delta && run.epsilon !== null ? make("span", { className: large ? "none" : "", title: large ? "above 1 / population" : "" }, run.delta < 1e-3 ? run.delta.toExponential() : String(run.delta)) : "";
      const when = run.changed ? day(run.changed) : "";
      const name = make("span", {}, run.step ? link : run.name, make("div", { className: "soft what" }, run.recipe || ""));
      const cells = [box, name, when, run.task || "", run.rule || "", run.state, where, metric, epsilon, delta];
      return make("tr", {}, ...cells.map((cell, i) => {
        const made = make("td", { className: i > 6 ? "n" : "" }, ...(Array.isArray(cell) ? cell : [cell]));
        made.dataset.label = titles[i];
        return made;
      }));
    }));
    if (focused) [...body.querySelectorAll("input")].find((box) => box.dataset.run === focused)?.focus();
    $("compare").disabled = picked.size < 2;
  }
  const day = (s) => new Date(1000 * s - 60000 * new Date(1000 * s).getTimezoneOffset()).toISOString().slice(0, 16).replace("T", " ");
  const duration = (s) => (s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
  $("compare").addEventListener("click", () => { location.href = "compare?" + new URLSearchParams([...picked].map((name) => ["run", name])); });

  /* ---- try it ---- */
  function choices(task) {
    const names = known.filter((run) => run.state === "finished" && run.task === task).map((run) => run.name);
    for (const [id, first] of [[task + "-run", names.length ? [] : [`no finished ${task} run here`]], [task + "-beside", ["no other run"]]]) {
      const select = $(id), before = select.value;
      if (names.join("\n") === select.dataset.names) continue;
      select.dataset.names = names.join("\n");
      select.replaceChildren(...first.map((said) => make("option", { value: "" }, said)), ...names.map((name) => make("option", { value: name }, name)));
      if (names.includes(before)) select.value = before;
    }
  }
  const post = (path, given, body) => ask(path, given, { method: "POST", body, headers: { "X-Confide": "1" } });
  /* Ask one run, or two in turn, since the server answers one at a time. Where one cannot answer, the other still does. */
  async function sideBySide(task, place, question, show) {
    const runs = [...new Set([$(task + "-run").value, $(task + "-beside").value])].filter(Boolean), sides = $(place);
    if (!runs.length) { say(task, `There is no finished ${task} run here.`, true); return; }
    const mine = (sides.dataset.asked = String(Number(sides.dataset.asked || 0) + 1));
    sides.replaceChildren();
    for (const run of runs) {
      say(task, runs.length > 1 ? `Asking ${run}…` : "Asking…");
      const inside = await question(run).then(show, (error) => [make("p", { className: "error" }, error.message)]);
      if (sides.dataset.asked !== mine) return; // something newer was asked meanwhile
      sides.append(make("section", {}, make("h3", {}, run), ...inside));
    }
    say(task, "");
  }
  async function hear(blob, file) {
    const player = $("player");
    if (blob.size > 50 * 2 ** 20) { say("speech", "The recording is larger than 50 MB.", true); return; }
    if (player.src) URL.revokeObjectURL(player.src);
    player.src = URL.createObjectURL(blob);
    player.hidden = false;
    await sideBySide("speech", "transcripts", (run) => post("api/transcribe", { run, file }, blob), (found) => [
      make("p", { className: "quote" }, found.text || "(nothing was heard)"),
      make("p", { className: "soft" }, `${found.seconds.toFixed(1)} s of audio in ${found.took.toFixed(1)} s`)]);
  }
  function say(where, text, bad = false) { const p = $(where + "-said"); p.textContent = text; p.classList.toggle("error", bad); }
  $("upload").addEventListener("change", () => { const file = $("upload").files[0]; if (file) hear(file, file.name); });
  $("speech").addEventListener("submit", (event) => event.preventDefault());

  let recorder = null;
  $("record").addEventListener("click", async () => {
    if (recorder) { recorder.stop(); return; }
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const pieces = [];
      recorder = new MediaRecorder(stream);
      recorder.addEventListener("dataavailable", (event) => pieces.push(event.data));
      recorder.addEventListener("stop", async () => {
        stream.getTracks().forEach((track) => track.stop());
        recorder = null;
        $("record").textContent = "Record";
        $("record").classList.remove("on");
        try { await hear(await asWav(new Blob(pieces)), "recording.wav"); } catch (error) { say("speech", "The recording cannot be read: " + error.message, true); }
      });
      recorder.start();
      $("record").textContent = "Stop";
      $("record").classList.add("on");
      say("speech", "Recording. Press the button again to stop.");
    } catch (error) { recorder = null; say("speech", "No microphone: " + error.message, true); }
  });
  /* What browsers record, the server's library does not read: 16 kHz mono WAV is read everywhere. */
  async function asWav(blob) {
    const context = new AudioContext(), sound = await context.decodeAudioData(await blob.arrayBuffer());
    await context.close();
    const rate = 16000, offline = new OfflineAudioContext(1, Math.max(1, Math.ceil(sound.duration * rate)), rate);
    const source = offline.createBufferSource();
    source.buffer = sound;
    source.connect(offline.destination);
    source.start();
    const samples = (await offline.startRendering()).getChannelData(0), view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
    const text = (at, word) => [...word].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
    text(0, "RIFF"); view.setUint32(4, 36 + 2 * samples.length, true); text(8, "WAVEfmt "); view.setUint32(16, 16, true);
    view.setUint16(20, 1, true); view.setUint16(22, 1, true); view.setUint32(24, rate, true); view.setUint32(28, 2 * rate, true);
    view.setUint16(32, 2, true); view.setUint16(34, 16, true); text(36, "data"); view.setUint32(40, 2 * samples.length, true);
    samples.forEach((v, i) => view.setInt16(44 + 2 * i, Math.max(-1, Math.min(1, v)) * 32767, true));
    return new Blob([view.buffer], { type: "audio/wav" });
  }
  $("retrieval").addEventListener("submit", async (event) => {
    event.preventDefault();
    const query = $("query").value, k = Number($("k").value) || 5;
    await sideBySide("retrieval", "documents", (run) => post("api/retrieve", null, JSON.stringify({ run, query, k })), (found) => [
      make("p", { className: "soft" }, `${found.documents.length} documents by ${found.method}; the score is the ${found.score}`),
      make("ol", {}, ...found.documents.map((d) => make("li", {}, make("strong", {}, d.id), ` ${number(d.score)} `, make("div", { className: "soft" }, d.text.slice(0, 600)))))]);
  });

  go();
  fillPresets().catch(() => {});
  answer();
  refresh();
})();
