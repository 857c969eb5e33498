// Draw the trends with uPlot (MIT, see uplot.LICENSE.txt).
(function () {
  "use strict";
  const root = document.body.dataset.root || "";
  const TICKS_S = [1, 5, 10, 30, 60, 180, 360, 720, 1440, 2880].map((minutes) => 60 * minutes);
  const latest = document.getElementById("held-now");
  let charts = [];
  let loads = 0;
  let drawn = 0;
  let hours = 6;

  function style(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function clock(seconds) {
    const date = new Date(seconds * 1000);
    const time = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
    return hours > 24 ? date.toLocaleDateString("en-CA").slice(5) + " " + time : time;
  }

  function draw(id, time, columns, unit, range) {
    const target = document.getElementById(id);
    const axis = { stroke: style("--text"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
    const series = columns.map(([label, values], i) => ({
      label, stroke: style(i ? "--second" : "--accent"), width: 2, spanGaps: false,
      fill: i ? undefined : style("--accent-soft"), points: { show: values.filter((v) => v !== null).length < 30 },
      value: (chart, value) => (value === null || value === undefined ? "–" : value + unit),
    }));
    const newest = (chart) => chart.cursor.idx ?? chart.setLegend({ idx: time.length - 1 });
    charts.push(new uPlot({
      width: target.clientWidth, height: 200, series: [{ value: (chart, time) => (time === null ? "–" : clock(time)) }, ...series],
      axes: [{ ...axis, incrs: TICKS_S, values: (chart, ticks) => ticks.map(clock) }, { ...axis, size: 60 }], scales: { y: { range } }, hooks: { ready: [newest], setCursor: [newest] }, cursor: { drag: { x: true, y: false } },
    }, [time, ...columns.map((column) => column[1])], target));
  }

  async function load() {
    const mine = ++loads;
    const period = hours;
    let data = null;
    try {
      const response = await fetch(root + "/api/trends?hours=" + hours, { credentials: "same-origin" });
      if (response.status === 401) location.reload(); // leads to the log-in
      if (response.ok) data = await response.json();
    } catch (error) { /* no answer */ }
    if (mine < drawn || period !== hours) return; // a later answer is there, or one for other hours comes
    drawn = mine;
    if (!data) {
      latest.textContent = "No answer.";
      return;
    }
    // A chart starts at what there is.
    const known = (i) => [data.allocated, data.wait, data.longest, data.queue].some((values) => values[i] !== null);
    const first = data.time.findIndex((_, i) => known(i));
    if (first > 0) Object.keys(data).forEach((key) => { if (Array.isArray(data[key])) data[key] = data[key].slice(first); });
    charts.forEach((chart) => chart.destroy());
    charts = [];
    const upTo = (least) => (chart, low, high) => [0, Math.max(least, (high || 0) * 1.1)];
    draw("chart-allocated", data.time, [["allocated", data.allocated]], " %", () => [0, 100]);
    draw("chart-wait", data.time, [["mean", data.wait], ["longest", data.longest]], " s", upTo(1));
    draw("chart-queue", data.time, [["pending", data.queue]], "", upTo(1));
    const last = data.allocated.filter((value) => value !== null).pop();
    latest.textContent = last === undefined ? "No data yet." : "Latest: " + Math.round(last) + " %";
  }

  document.querySelectorAll("[data-hours]").forEach((button) => button.addEventListener("click", () => {
    hours = Number(button.dataset.hours);
    document.querySelectorAll("[data-hours]").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    load();
  }));
  let resized = null;
  window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(load, 200); });
  document.addEventListener("themechange", load);
  load();
  setInterval(load, 15000);
})();
