// The page's script: asks the node for its documents and shows them. It writes texts as texts, never as HTML: names of
// models, tenants and rounds come from clients. Numbers of now are differences between two answers of /stats.
"use strict";

const STATS_MS = 2000, FAMILIES_MS = 6000, CURVES_MS = 15000, WAIT_MS_MAX = 30000, TIMEOUT_MS = 8000, SETTLE_MS = 150;
const SPARKS_MAX = 60, ROWS_MAX = 6, NAMESPACES_MAX = 8, NODES_MAX = 16, CURVE_ROWS = 8;
const SVG = "http://www.w3.org/2000/svg";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const now = { stats: null, before: null, curves: null, plan: null, planned: null, isPaused: false };

const at = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, one) => total + one, 0);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// Texts

function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) { count /= 1024; unit += 1; }
  return unit === 0 ? `${Math.round(count)} B` : `${count.toFixed(count < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

function number(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} G`;
  if (count >= 1e6) return `${(count / 1e6).toFixed(1)} M`;
  if (count >= 1e4) return `${(count / 1e3).toFixed(1)} k`;
  return count >= 100 || Number.isInteger(count) ? count.toFixed(0) : count.toFixed(1);
}

function percent(share) { return `${(share * 100).toFixed(1)} %`; }

function time(seconds) {
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 6000) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

function say(id, text) { if (at(id).textContent !== text) at(id).textContent = text; }

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function line(left, right) {
  const row = make("span", "line");
  row.append(make("span", "", left), make("span", "", right));
  row.title = left;
  return row;
}

function fill(bar, shares, text) {
  const parts = bar.querySelectorAll(".fill");
  shares.forEach((share, index) => { parts[index].style.width = `${clamp(share, 0, 1) * 100}%`; });
  if (bar.getAttribute("role") === "img") { bar.setAttribute("aria-label", text); return; }
  bar.setAttribute("aria-valuenow", clamp(sum(shares) * 100, 0, 100).toFixed(0));
  bar.setAttribute("aria-valuetext", text);
}

// Asking

async function ask(path) {
  const reply = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  const document_ = await reply.json();
  if (!reply.ok) throw new Error(document_.message || `the node answered ${reply.status}`);
  return document_;
}

function state(text, isDown) {
  say("state", text);
  at("state").classList.toggle("down", isDown);
}

// One question at a time of each kind, longer waits while nobody answers, none while nobody looks.
function every(pauseMs, work) {
  let waitMs = pauseMs, timer = 0, isAsking = false;
  async function turn() {
    clearTimeout(timer);
    if (isAsking) return;
    isAsking = true;
    try {
      if (!document.hidden && !now.isPaused) { await work(); waitMs = pauseMs; }
    } catch (error) {
      waitMs = Math.min(waitMs * 2, WAIT_MS_MAX);
      state(error instanceof TypeError || error.name === "TimeoutError" ? "no answer" : error.message, true);
    } finally {
      isAsking = false;
      timer = setTimeout(turn, waitMs);
    }
  }
  document.addEventListener("visibilitychange", turn);
  turn();
  return turn;
}

// Tiers

function showTiers(stats) {
  const { host, ssd, caches, integrity } = stats;
  fill(at("host-bar"), [host.used_bytes / host.capacity_bytes], `${bytes(host.used_bytes)} of ${bytes(host.capacity_bytes)}`);
  at("host-bar").querySelector(".held").style.width = `${clamp(host.held_bytes / host.capacity_bytes, 0, 1) * 100}%`;
  say("host-text", `${bytes(host.used_bytes)} of ${bytes(host.capacity_bytes)}`);
  say("host-note", `caches ${number(host.caches)}, leased ${bytes(host.held_bytes)}, evicted ${number(stats.evictions.host.caches)}${integrity.corrupt.host ? `, corrupt ${number(integrity.corrupt.host)}` : ""}`);
  fill(at("ssd-bar"), [ssd.capacity_bytes ? ssd.used_bytes / ssd.capacity_bytes : 0], ssd.is_open ? `${bytes(ssd.used_bytes)} of ${bytes(ssd.capacity_bytes)}` : "none");
  say("ssd-text", ssd.is_open ? `${bytes(ssd.used_bytes)} of ${bytes(ssd.capacity_bytes)}` : "none");
  const worry = ssd.is_below_floor ? ", file system too full: nothing is written" : "";
  say("ssd-note", ssd.is_open ? `caches ${number(ssd.caches)}, to be written ${number(ssd.queued)}, corrupt ${number(integrity.corrupt.ssd)}${worry}` : "no SSD tier: what leaves memory is lost");
  showOthers(stats);
  showKinds(caches);
}

// Of the segments that nothing here answered: brought from other nodes (or cold storage), and left there since computing
// them is sooner. The rest nobody had.
function showOthers({ remote, pushes, network }) {
  const others = network.others, asked = Math.max(remote.asked, 1);
  const isAlone = !others.length && !network.peer_connections;
  const brought = remote.found - remote.computed_sooner, live = others.filter((one) => one.state === "live").length;
  const shares = [Math.max(brought, 0) / asked, remote.computed_sooner / asked];
  const text = `of ${number(remote.asked)} segments asked for there ${percent(shares[0])} came, ${percent(shares[1])} are computed sooner`;
  fill(at("others-bar"), shares, remote.asked ? text : "nobody was asked");
  say("others-text", isAlone ? "none" : `${bytes(remote.record_bytes)} in, ${bytes(pushes.record_bytes)} out`);
  const lost = remote.unreachable ? `, not reached ${number(remote.unreachable)}` : "";
  const nodes = others.length ? `live ${live} of ${others.filter((one) => one.state !== "cold").length}, asked ${number(remote.asked)}, found ${number(remote.found)}${lost}, to be given ${number(pushes.queued)}` : `connected here ${number(network.peer_connections)}`;
  say("others-note", isAlone ? "shares with no other node" : nodes);
}

function showKinds(caches) {
  const { master, mirror } = caches, dense = Math.max(caches.dense_bytes, 1);
  const stored = master.record_bytes + mirror.record_bytes;
  fill(at("kinds-bar"), [master.record_bytes / dense, mirror.record_bytes / dense], `${bytes(stored)} stand for ${bytes(caches.dense_bytes)}`);
  say("kinds-text", `${bytes(stored)} for ${bytes(caches.dense_bytes)}, ${caches.ratio.toFixed(1)} times`);
  say("kinds-note", `masters ${number(master.count)}, ${bytes(master.record_bytes)}; mirrors ${number(mirror.count)}, ${bytes(mirror.record_bytes)}`);
}

// Rates

// Its tile, the counter that it is the change of (found: see below), and how it is written.
const TILES = [
  ["lookups", (s) => s.lookups.calls, number],
  ["segments", (s) => s.accounting.asked_segments, number],
  ["found", null, percent],
  ["written", (s) => s.writes.published_bytes, bytes],
  ["loaded", (s) => s.loads.record_bytes, bytes],
  ["brought", (s) => s.remote.record_bytes, bytes],
  ["given", (s) => s.pushes.record_bytes, bytes],
  ["evicted", (s) => s.evictions.host.record_bytes, bytes],
];
const sparks = Object.fromEntries(TILES.map(([id]) => [id, []]));

const foundOf = (segments) => segments.host + segments.ssd + segments.remote + segments.moved;

// Null after a restart of the node, or without a first answer: a difference would mean nothing.
function difference(read) {
  const { stats, before } = now;
  if (!before || before.boot_epoch !== stats.boot_epoch) return null;
  const seconds = stats.uptime_s - before.uptime_s, change = read(stats) - read(before);
  return seconds > 0 && change >= 0 ? change / seconds : null;
}

function showRates() {
  const asked = difference((s) => s.accounting.asked_segments), found = difference((s) => foundOf(s.accounting.segments));
  for (const [id, read, text] of TILES) {
    const rate = read ? difference(read) : asked ? found / asked : null;
    say(`rate-${id}`, rate === null ? "\u2013" : text(rate));
    sparks[id].push(rate === null ? 0 : rate);
    if (sparks[id].length > SPARKS_MAX) sparks[id].shift();
    const most = Math.max(...sparks[id], 1e-9), shift = SPARKS_MAX - sparks[id].length;
    const points = sparks[id].map((one, index) => `${index + shift} ${(9.5 - (one / most) * 9).toFixed(1)}`);
    at(`rate-${id}`).nextSibling.firstChild.setAttribute("d", `M${points.join("L")}`);
  }
  showAnswers(now.stats.accounting.segments);
}

function showAnswers(segments) {
  const parts = [["memory", "host"], ["SSD", "ssd"], ["other nodes", "remote"], ["another context", "moved"], ["missed", "miss"], ["error", "error"]];
  const answered = sum(Object.values(segments)), shares = parts.map(([, key]) => segments[key] / Math.max(answered, 1));
  fill(at("answers-bar"), shares, answered ? parts.map(([name], index) => `${name} ${percent(shares[index])}`).join(", ") : "no lookups yet");
  say("answers-text", answered ? `${percent(foundOf(segments) / answered)} of ${number(answered)} found` : "no lookups yet");
}

async function refreshStats() {
  const stats = await ask("/stats");
  now.before = now.stats;
  now.stats = stats;
  showTiers(stats);
  showRates();
  showNodes(stats.network.others);
  showNamespaces(stats.by_namespace);
  say("version", stats.version);
  say("uptime", `up ${time(stats.uptime_s)}`);
  say("sessions", `sessions ${number(stats.handles.sessions)}, leases ${number(stats.handles.leases)}`);
  state("live", false);
}

// Curves

function scopeQuery() {
  const [kind, name] = at("scope").value.split(/ (.*)/s);
  return name === undefined ? "" : `${kind}=${encodeURIComponent(name)}`;
}

function showScopes(names) {
  const options = ["", ...names.filter((one) => one.startsWith("tenant ") || one.startsWith("namespace "))];
  const select = at("scope"), chosen = select.value;
  if (options.length === select.options.length && options.every((one, index) => one === select.options[index].value)) return;
  if (document.activeElement === select) return;
  select.replaceChildren(...options.map((one) => {
    const option = make("option", "", one === "" ? "the whole node" : one.length > 48 ? `${one.slice(0, 47)}\u2026` : one);
    option.value = one;
    return option;
  }));
  select.value = options.includes(chosen) ? chosen : "";
}

// Sizes that matter: from where the curve begins to where it ends, the present ones with room around them, and what-ifs.
function bounds(curves) {
  const best = Math.max(...curves.hit_ratio, 0), sizes = [curves.host_bytes, curves.ssd_bytes].filter(Boolean);
  const first = curves.bytes[curves.hit_ratio.findIndex((one) => one > best * 0.01)] || sizes[0];
  const last = curves.bytes[curves.hit_ratio.findIndex((one) => one >= best * 0.999)] || sizes[0];
  const planned = now.planned ? Math.max(now.planned.host, now.planned.ssd) : 0;
  return [Math.log2(Math.min(first, sizes[0] / 16)), Math.log2(Math.max(last * 2, Math.max(...sizes) * 8, planned * 1.1))];
}

function showChart() {
  const curves = now.curves;
  if (!curves) return;
  const width = Math.max(at("chart").clientWidth, 240), height = at("chart").clientHeight || 272;
  const [low, high] = bounds(curves), left = 46, right = width - 12, top = 22, bottom = height - 24;
  const x = (size) => left + (clamp(Math.log2(size), low, high) - low) / (high - low) * (right - left);
  const y = (missed) => top + (1 - missed) * (bottom - top);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  svg.append(...axes(low, high, width, x, y), ...marks(curves, x, top, bottom));
  for (const [ratios, name] of [[curves.hit_ratio, "lookups"], [curves.seconds_ratio, "weighted"]]) {
    if (ratios.length) svg.append(draw("path", { class: name, d: path(curves.bytes, ratios, low, high, x, y) }));
  }
  for (const point of curves.simulated) {
    if (!point.bytes || Math.log2(point.bytes) > high) continue;
    svg.append(draw("circle", { class: point.is_reliable ? "" : "weak", cx: x(point.bytes), cy: y(1 - point.hit_ratio), r: 4 }));
  }
  at("chart").replaceChildren(svg);
}

function path(sizes, ratios, low, high, x, y) {
  const points = [];
  sizes.forEach((size, index) => {
    if (Math.log2(size) >= low && Math.log2(size) <= high) points.push(`${x(size).toFixed(1)} ${y(1 - ratios[index]).toFixed(1)}`);
  });
  return points.length ? `M${points.join("L")}` : "";
}

function axes(low, high, width, x, y) {
  const parts = [];
  for (const missed of [0, 0.25, 0.5, 0.75, 1]) {
    parts.push(draw("line", { class: "grid", x1: 46, x2: width - 12, y1: y(missed), y2: y(missed) }));
    parts.push(draw("text", { x: 40, y: y(missed) + 4, "text-anchor": "end" }, `${missed * 100} %`));
  }
  const step = Math.max(Math.ceil((high - low) / Math.max(Math.floor(width / 95), 2)), 1);
  for (let power = Math.ceil(low); power <= high; power += step) {
    const size = 2 ** power, end = power + step > high ? "end" : power === Math.ceil(low) ? "start" : "middle";
    parts.push(draw("text", { x: x(size), y: y(0) + 17, "text-anchor": end }, bytes(size).replace(".0", "")));
  }
  return parts;
}

function marks(curves, x, top, bottom) {
  const planned = now.planned, parts = [];
  const sizes = [["memory", curves.host_bytes, "present"], ["SSD", curves.ssd_bytes, "present"]];
  if (planned && planned.host !== curves.host_bytes) sizes.push(["", planned.host, "planned"]);
  if (planned && planned.ssd && planned.ssd !== curves.ssd_bytes) sizes.push(["", planned.ssd, "planned"]);
  for (const [name, size, kind] of sizes) {
    if (!size) continue;
    parts.push(draw("line", { class: kind, x1: x(size), x2: x(size), y1: top, y2: bottom }));
    if (name) parts.push(draw("text", { class: "name", x: x(size) + (name === "SSD" ? 4 : -4), y: 14, "text-anchor": name === "SSD" ? "start" : "end" }, name));
  }
  return parts;
}

function ratioAt(curves, ratios, size) {
  let index = 0;
  while (index + 1 < curves.bytes.length && curves.bytes[index + 1] <= size) index += 1;
  return ratios[index];
}

function showCurveTable(curves) {
  const rows = [], [low, high] = bounds(curves);
  for (let row = 0; row < CURVE_ROWS && curves.bytes.length; row += 1) {
    const size = 2 ** (low + (high - low) * row / (CURVE_ROWS - 1)), tr = make("tr");
    tr.append(make("td", "", bytes(size)));
    for (const ratios of [curves.hit_ratio, curves.seconds_ratio]) tr.append(make("td", "", percent(1 - ratioAt(curves, ratios, size))));
    rows.push(tr);
  }
  at("curve-table").querySelector("tbody").replaceChildren(...rows);
}

async function refreshCurves() {
  const chosen = at("scope").value;
  const curves = await ask(`/curves?${scopeQuery()}`);
  if (at("scope").value !== chosen) return;
  if (!now.curves && !curves.ssd_bytes) at("ssd-slider").value = at("ssd-slider").min;  // none, as it is
  now.curves = curves;
  showScopes(curves.scopes);
  showChart();
  showCurveTable(curves);
  const there = curves.hit_ratio.length ? ratioAt(curves, curves.hit_ratio, curves.host_bytes) : null;
  const text = there === null ? "no lookups yet, so there is no curve" : `${percent(1 - there)} of lookups are missed with memory of ${bytes(curves.host_bytes)}`;
  at("chart").setAttribute("aria-label", `Misses by size: ${text}. The table below has the numbers.`);
  const window_ = `${number(curves.references)} lookups of segments in ${time(curves.window_s)}, ${number(curves.segments_watched)} segments watched`;
  say("curve-note", there === null ? `${text}.` : `${text}; ${window_}.`);
}

// What if

function sliderText(factor, size) { return `${bytes(size)}${factor === null ? "" : `, ${factor.toFixed(factor < 1 ? 2 : 1)} times`}`; }

// Without an SSD tier its slider goes from none to 32 times the memory.
function plannedSizes() {
  const { host_bytes: host, ssd_bytes: ssd } = now.curves, hostFactor = 2 ** Number(at("host-slider").value);
  const step = Number(at("ssd-slider").value), ssdFactor = 2 ** step;
  const ssdSize = ssd ? ssd * ssdFactor : step <= -3 ? 0 : host * ssdFactor;
  return { host: Math.round(host * hostFactor), hostFactor, ssd: Math.round(ssdSize), ssdFactor: ssd ? ssdFactor : null };
}

function showSliders() {
  if (!now.curves) return;
  now.planned = plannedSizes();
  const { host, hostFactor, ssd, ssdFactor } = now.planned;
  const texts = [["host", sliderText(hostFactor, host)], ["ssd", ssd ? sliderText(ssdFactor, ssd) : "none"]];
  for (const [name, text] of texts) {
    say(`${name}-size`, text);
    at(`${name}-slider`).setAttribute("aria-valuetext", text);
  }
  showChart();
}

let asked = 0;

async function refreshPlan() {
  if (!now.curves) return;
  showSliders();
  const mine = ++asked, scope = scopeQuery();
  const plan = await ask(`/plan?host=${now.planned.host}&ssd=${now.planned.ssd}${scope ? `&${scope}` : ""}`);
  if (mine !== asked) return;  // an older answer than the slider's place
  now.plan = plan;
  showPlan("now", plan.now);
  showPlan("plan", plan.planned);
  const texts = plan.advice.length ? plan.advice : [plan.missing];
  if (texts.join("\n") !== [...at("advice").children].map((one) => one.textContent).join("\n")) {
    at("advice").replaceChildren(...texts.map((one) => make("p", "", one)));
  }
}

function showPlan(name, sizes) {
  const cell = (id, text) => say(`${name}-${id}`, sizes ? text() : "\u2013");
  cell("hits", () => percent(sizes.hit_ratio));
  cell("error", () => percent(sizes.error));
  cell("host", () => percent(sizes.host_hit_ratio));
  cell("saved", () => number(sizes.prefill_saved_s_per_hour));
  cell("lost", () => number(sizes.prefill_lost_s_per_hour));
}

function settled(work) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(() => work().catch((error) => state(error.message, true)), SETTLE_MS);
  };
}

// Rounds and families

function familyBar(family) {
  const bar = make("div", "bar"), dense = Math.max(family.dense_bytes, 1);
  for (const group of family.groups) {
    for (const [kind, size] of [["master", group.master_bytes], ...group.mirror_sizes.map((one) => ["mirror", one])]) {
      const part = make("i", `fill ${kind}`);
      part.style.width = `${size / dense * 100}%`;
      bar.append(part);
    }
  }
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `${bytes(family.record_bytes)} stand for ${bytes(family.dense_bytes)}`);
  return bar;
}

function familySummary(family) {
  const summary = make("summary");
  const saved = family.dense_bytes / Math.max(family.record_bytes, 1);
  summary.append(line(`${family.segment.slice(0, 8)} ${family.model}`, `caches ${number(family.members)}, ${saved.toFixed(1)} times`), familyBar(family));
  return summary;
}

function groupRow(group) {
  const row = make("div", "row"), where = group.ssd_bytes ? (group.host_bytes ? "memory and SSD" : "SSD") : "memory";
  const mirrors = group.mirrors ? `mirrors ${group.mirrors}, ${bytes(group.mirror_bytes)}` : "no mirrors";
  row.append(line(`master ${bytes(group.master_bytes)} at ${group.position}`, mirrors));
  const sizes = group.mirror_sizes.map(bytes).join(", ");
  row.append(make("p", "small", `in ${where}, used ${number(group.uses)} times, stands for ${bytes(group.dense_bytes)}${sizes ? `; mirrors: ${sizes}` : ""}`));
  return row;
}

function familyRow(family) {
  const row = make("details"), deep = make("div", "deep");
  const partial = family.looked_at < family.members ? `; of the last ${family.looked_at} used` : "";
  deep.append(make("p", "small", `tokens ${family.tokens}, groups ${family.group_count}, tenant ${family.tenant}${partial}`), ...family.groups.map(groupRow));
  row.append(familySummary(family), deep);
  return row;
}

function roundRow(round) {
  const row = make("details"), summary = make("summary"), deep = make("div", "deep");
  summary.append(line(round.name || "(no name)", `${time(round.age_s)} ago`));
  summary.append(make("p", "small", `caches ${round.members}, segments ${round.segments}; ${bytes(round.bytes_before)} became ${bytes(round.bytes_after)}`));
  const gone = round.families.length ? [] : [make("p", "small", "Its families are gone.")];
  deep.append(...gone, ...round.families.map((family) => { const one = make("div", "row"); one.append(...familySummary(family).childNodes); return one; }));
  row.append(summary, deep);
  return row;
}

// A list stays as it is while somebody is in it or has something open: it must not move under a reader.
function showList(id, rows, empty) {
  const list = at(id);
  if (list.contains(document.activeElement) || list.querySelector("details[open]")) return;
  list.replaceChildren(...(rows.length ? rows : [make("p", "empty", empty)]));
}

// Other nodes. Their names are what they say of themselves: texts.

function speedText(way) {
  if (!way.transfers) return "not measured yet";
  const latency = way.latency_s < 1 ? `${(way.latency_s * 1e3).toFixed(way.latency_s < 0.01 ? 2 : 0)} ms` : time(way.latency_s);
  return `${latency}, ${bytes(way.bytes_per_s)}/s`;
}

function wayRow([medium, way], total) {
  const reasons = Object.entries(way.reasons).sort((left, right) => right[1] - left[1]);
  const why = reasons.length ? `: ${reasons.map(([name, count]) => `${name} ${number(count)}`).join(", ")}` : "";
  const failed = way.failed ? `; failed ${number(way.failed)}` : "";
  const loads = way.chosen ? `${number(way.chosen)} of ${number(total)} loads, ${bytes(way.bytes)}${why}${failed}` : total ? `none of ${number(total)} loads` : "no loads yet";
  return line(`${medium.replace("_", " ")}, ${speedText(way)}`, loads);
}

function nodeRow(other) {
  const row = make("div", "row"), head = make("p", "line"), name = make("span", "name", other.name);
  const isGood = other.state === "cold" || (other.state === "live" && other.is_answering);
  name.append(make("b", isGood ? "" : "bad", other.state === "cold" ? "cold storage" : other.state));
  if (other.state === "live" && other.warmth < 1) name.append(make("b", "", `warming, ${percent(other.warmth)}`));
  name.title = `${other.name} at ${other.address}`;
  head.append(name, make("span", "", `${bytes(other.brought_bytes)} brought; ${bytes(other.given_bytes)} given in ${number(other.given)}`));
  row.append(head);
  const ways = Object.entries(other.ways), total = sum(ways.map(([, way]) => way.chosen));
  for (const way of ways) {
    const one = wayRow(way, total);
    one.classList.add("small");
    row.append(one);
  }
  if (other.problem) row.append(make("p", "small", other.problem));
  return row;
}

function showNodes(others) {
  at("nodes").hidden = !others.length;
  at("node-list").replaceChildren(...others.slice(0, NODES_MAX).map(nodeRow));
  say("node-count", others.length > NODES_MAX ? `the first ${NODES_MAX} of ${number(others.length)}` : number(others.length));
}

// The node names the busiest namespaces and counts all others together.
function showNamespaces(namespaces) {
  const heldBytes = ([, one]) => sum(Object.values(one.held.bytes_by_tier));
  const rows = Object.entries(namespaces).filter(([, one]) => one.held.caches || one.asked_segments);
  rows.sort((left, right) => heldBytes(right) - heldBytes(left) || right[1].asked_segments - left[1].asked_segments);
  at("namespace-rows").replaceChildren(...rows.slice(0, NAMESPACES_MAX).map(([name, one]) => namespaceRow(name, one, heldBytes([name, one]))));
  say("namespace-count", `those that hold most, of ${number(now.stats.caches.namespaces)}`);
}

function namespaceRow(name, one, heldBytes) {
  const row = make("tr"), answered = sum(Object.values(one.segments));
  const found = answered ? percent(foundOf(one.segments) / answered) : "\u2013";
  const lossy = ["", "other", undefined].includes(one.lossy) ? "" : ` (lossy: ${one.lossy})`;
  const cells = [[one.model + lossy, ""], [one.tenant, "wide-only"], [name.slice(0, 12), "wide-only"], [bytes(heldBytes), "number"], [number(one.asked_segments), "number wide-only"], [found, "number"]];
  for (const [text, kind] of cells) row.append(make("td", kind, text));
  row.firstChild.title = `${one.model}${lossy}, tenant ${one.tenant}`;
  return row;
}

async function refreshFamilies() {
  const answer = await ask(`/families?count=${ROWS_MAX}`);
  showList("round-list", answer.rounds.slice(0, ROWS_MAX).map(roundRow), "No round was committed yet.");
  showList("family-list", answer.families.slice(0, ROWS_MAX).map(familyRow), "Nothing is stored yet.");
  say("round-count", `${number(answer.round_count)} since the start`);
  const newest = answer.families_looked_at < answer.family_count ? `the largest of the newest ${number(answer.families_looked_at)} of ` : "the largest of ";
  say("family-count", `${newest}${number(answer.family_count)}`);
}

// A round by closed forms

async function refreshRound() {
  const query = new URLSearchParams();
  for (const field of at("round-fields").querySelectorAll("input, select")) {
    query.set(field.name, field.value);
    const output = field.parentNode.querySelector(".value");
    if (!output) continue;
    output.textContent = field.name === "agents" ? field.value : percent(Number(field.value));
    field.setAttribute("aria-valuetext", output.textContent);
  }
  let answer;
  try {
    answer = (await ask(`/plan?${query}`)).what_if;
  } catch (error) {
    say("round-answer", error.message);
    say("round-notes", "");
    return;
  }
  const limit = answer.ratio_limit === null ? "" : `, at most ${answer.ratio_limit.toFixed(1)} with more agents`;
  const fits = now.stats ? now.stats.host.capacity_bytes / answer.stored_bytes : 0;
  const rounds = now.stats ? `; memory of ${bytes(now.stats.host.capacity_bytes)} keeps ${fits < 1 ? "less than one such round" : `${number(Math.floor(fits))} of them`}` : "";
  say("round-answer", `${bytes(answer.stored_bytes)} instead of ${bytes(answer.dense_bytes)}: ${answer.ratio.toFixed(1)} times less${limit}. A mirror takes ${bytes(answer.mirror_bytes)}, prefill ${number(answer.prefill_tokens)} tokens of ${number(answer.prefill_tokens_without)}${rounds}.`);
  say("round-notes", answer.notes.join("; "));
}

// Start

function start() {
  const turns = [
    every(STATS_MS, refreshStats),
    every(CURVES_MS, async () => { await refreshCurves(); await refreshPlan(); }),
    every(FAMILIES_MS, refreshFamilies),
  ];
  const plan = settled(refreshPlan), round = settled(refreshRound);
  for (const name of ["host", "ssd"]) at(`${name}-slider`).addEventListener("input", () => { showSliders(); plan(); });
  at("scope").addEventListener("change", settled(async () => { await refreshCurves(); await refreshPlan(); }));
  at("round-fields").addEventListener("input", round);
  at("pause").addEventListener("click", () => {
    now.isPaused = !now.isPaused;
    at("pause").setAttribute("aria-pressed", String(now.isPaused));
    say("pause", now.isPaused ? "Go on" : "Pause");
    state(now.isPaused ? "paused" : "live", false);
    for (const turn of turns) turn();
  });
  new ResizeObserver(showChart).observe(at("chart"));
  round();
}

start();
