"use strict";
// The section on speculation: who decoded what, and what it brought. Drawn only where the page has the section.

const DRAFTER_COLORS = { plain: "--faint", ngram: "--gold", suffix: "--teal", eagle: "--violet" };
const REASON_COLORS = {
  "pays most": "--teal", trial: "--gold", fixed: "--blue", "plain is faster": "--faint",
  "more requests than max_running": "--orange", "no drafter": "--red", rests: "--blue", unmeasured: "--violet",
};
const drafterColor = (name) => css(DRAFTER_COLORS[name] || "--pink");

// Mean numbers of running requests per time bin, stacked: {step, width_s, running: {drafter: [mean per bin]}}.
function runningChart(host, data, options = {}) {
  const names = Object.keys(data.running);
  if (!names.length) return void htmlEl("div", "empty", host, "No data recorded");
  const count = data.running[names[0]].length;
  const sums = Array.from({ length: count }, (_, i) => names.reduce((sum, name) => sum + data.running[name][i], 0));
  const legend = names.map((name) => ({ name, color: drafterColor(name) }));
  chart(host, options.height || 210, legend, (svg, width, height) => {
    const top = Math.max(...sums, 1);
    const { X, Y, inner } = axes(svg, width, height, [0, count * data.width_s], [0, top * 1.06], {});
    let base = sums.map(() => 0);
    for (const name of names) {
      const next = base.map((v, i) => v + data.running[name][i]);
      const at = (i, v) => `${X(i * data.width_s).toFixed(1)} ${Y(v).toFixed(1)}`;
      const up = next.map((v, i) => `L${at(i, v)}L${at(i + 1, v)}`).join("");
      const down = base.map((v, i) => `L${at(i + 1, v)}L${at(i, v)}`).reverse().join("");
      svgEl("path", { d: `M${at(0, base[0])}${up}${down}Z`, fill: drafterColor(name), "fill-opacity": 0.85 }, svg);
      base = next;
    }
    return (px) => {
      const i = Math.floor(((px - inner.x0) / (inner.x1 - inner.x0)) * count);
      if (i < 0 || i >= count) return null;
      const items = names.map((name) => ({ name, color: drafterColor(name), value: data.running[name][i].toFixed(1) }));
      return { title: `after ${short((i + 0.5) * data.width_s)} s`, items: items.reverse() };
    };
  });
}

if (DATA.speculation) {
  const S = DATA.speculation;
  const lines = (values, x) => S.drafters.map((name) => ({ name, color: drafterColor(name), x: x || S.steps, y: values[name] }));
  for (const data of S.running) {
    const box = htmlEl("div", "", host("chart-running"));
    htmlEl("h3", "", box, `Step ${data.step}: running requests over seconds, by what decodes them`);
    runningChart(box, data);
  }
  if (!S.running.length) htmlEl("div", "empty", host("chart-running"), "No data recorded");
  lineChart(host("chart-acceptance"), lines(S.acceptance), { zero: true, height: 190 });
  lineChart(host("chart-accept-length"), lines(S.accept_length), { height: 190 });
  const deepest = Math.max(0, ...S.drafters.map((name) => S.positions[name].length));
  const positions = Array.from({ length: deepest }, (_, i) => i + 1);
  const padded = (name) => positions.map((p) => S.positions[name][p - 1] ?? null);
  lineChart(
    host("chart-positions"),
    lines(Object.fromEntries(S.drafters.map((name) => [name, padded(name)])), positions).map((s) => ({ ...s, dots: true })),
    { zero: true, height: 190, title: "position" },
  );
  lineChart(host("chart-saved"), lines(S.saved_s), { zero: true, height: 190, unit: " s" });
  const all = S.steps.map((_, i) => Object.values(S.engine_steps).reduce((sum, v) => sum + v[i], 0) || 1);
  stackedBars(
    host("chart-strategies"),
    S.steps,
    Object.keys(S.engine_steps).map((name) => ({ name, color: drafterColor(name), y: S.engine_steps[name].map((v, i) => (100 * v) / all[i]) })),
    { height: 190, unit: " %" },
  );
  const percent = (values) => values.map((v) => (v === null ? null : 100 * v));
  stackedBars(
    host("chart-reasons"),
    S.steps,
    Object.keys(S.reasons).map((name) => ({ name, color: css(REASON_COLORS[name] || "--pink"), y: percent(S.reasons[name]) })),
    { height: 190, unit: " %" },
  );
  const both = Object.keys(S.expected_s).flatMap((name) => [
    { name, color: drafterColor(name), x: S.steps, y: S.measured_s[name] },
    { name: `${name}, predicted`, color: drafterColor(name), x: S.steps, y: S.expected_s[name], dash: "5 4", faint: true },
  ]);
  lineChart(host("chart-predicted"), both, { zero: true, height: 190, unit: " s" });
  lineChart(
    host("chart-predicted-error"),
    [{ name: "mean absolute error", color: css("--red"), x: S.steps, y: percent(S.predicted_error) }],
    { zero: true, height: 190, unit: " %" },
  );
}
