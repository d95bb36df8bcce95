"use strict";
// Puts the embedded data into the charts of the page.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PHASE_COLORS = {
  rollout: "--teal", reward_wait: "--pink", learn: "--orange", publish: "--blue", sync: "--violet", other: "--faint",
};
const css = (name) => `var(${name})`;
const host = (id) => document.getElementById(id);
const column = (name) => DATA.series[name] || DATA.steps.map(() => null);
const one = (label, name, color, more = {}) => ({ name: label, color: css(color), x: DATA.steps, y: column(name), metric: name, ...more });

function smooth(values, weight) {
  let state = null;
  return values.map((v) => {
    if (!finite(v)) return state;
    state = state === null ? v : weight * v + (1 - weight) * state;
    return state;
  });
}

// With another run's curve, dashed, beside the first that is not faint: more than one makes a chart unreadable.
function beside(series, weight = 1) {
  const first = series.find((s) => s.metric && !s.faint);
  const other = first && DATA.against && DATA.against.series[first.metric];
  if (!other) return series;
  const twin = { ...first, name: `${first.name}, ${DATA.against.name}`, x: DATA.against.steps, y: smooth(other, weight), dash: "6 4" };
  return [...series, { ...twin, color: css("--ink") }];
}
const drawLines = (id, series, options, weight) => lineChart(host(id), beside(series, weight), options);

const reward = one("train, every step", "reward/mean", "--blue", { faint: true });
const rival = DATA.against;
drawLines(
  "chart-reward",
  [
    reward,
    { ...reward, name: "train, smoothed", faint: false, y: smooth(reward.y, 0.25) },
    { name: "held-out", color: css("--orange"), x: DATA.evals.x, y: DATA.evals.y, dots: true },
    ...(rival ? [{ name: `held-out, ${rival.name}`, color: css("--gold"), x: rival.evals.x, y: rival.evals.y, dots: true, dash: "6 4" }] : []),
  ],
  { height: 290 },
  0.25,
);
const shaped = [
  ["length_penalty/reward", "with the length penalty", "--gold"], ["overlong/reward", "less what overlong ones lose", "--blue"],
].filter(([name]) => DATA.series[name]);
if (shaped.length) {
  htmlEl("h3", "", host("chart-reward-parts"), "Reward less what long responses lose");
  lineChart(
    host("chart-reward-parts"),
    [one("as graded", "reward/mean", "--slate"), ...shaped.map(([name, label, color]) => one(label, name, color))],
    { height: 170 },
  );
}
const PALETTE = ["--teal", "--violet", "--gold", "--pink", "--green", "--slate"];
const parts = Object.keys(DATA.series).filter((name) => /^reward\/(?!mean$|std$)/.test(name));
if (parts.length > 1) {
  htmlEl("h3", "", host("chart-reward-parts"), "Terms of the reward");
  const line = (name, i) => one(name.slice(7), name, PALETTE[i % PALETTE.length], { y: smooth(column(name), 0.25) });
  lineChart(host("chart-reward-parts"), parts.map(line), { height: 170 });
}
drawLines(
  "chart-lengths",
  [
    one("median", "length/p50", "--teal"), one("mean", "length/mean", "--slate", { dash: "4 4" }),
    one("90 %", "length/p90", "--blue"), one("99 %", "length/p99", "--violet"), one("longest", "length/max", "--red", { faint: true }),
  ],
  { zero: true },
);
if (DATA.lengths) {
  const { edges, first, last } = DATA.lengths;
  const sets = [{ name: `step ${first.step}`, color: css("--slate"), counts: first.counts }];
  if (last.step !== first.step) sets.push({ name: `step ${last.step}`, color: css("--teal"), counts: last.counts });
  histogram(host("chart-histogram"), edges, sets);
} else htmlEl("div", "empty", host("chart-histogram"), "No data recorded");
stackedBars(
  host("chart-time"),
  DATA.steps,
  DATA.phases.map((p) => ({ name: p.name.replace("_", " "), color: css(PHASE_COLORS[p.name] || "--faint"), y: p.values })),
  { unit: " s" },
);
drawLines("chart-speed", [one("tokens/s", "tokens_per_s", "--teal")], { zero: true });
gantt(host("chart-gantt"), DATA.timeline);
drawLines("chart-gap", [one("mean", "logprob_gap/mean", "--blue"), one("largest", "logprob_gap/max", "--red")], { log: true, height: 190 });
drawLines("chart-loss", [one("loss", "loss/mean", "--orange")], { height: 190 });
drawLines("chart-grad", [one("gradient norm", "grad_norm/mean", "--violet")], { zero: true, height: 190 });
drawLines(
  "chart-clip",
  [
    one("all", "clip_fraction", "--pink"),
    one("below", "clip_fraction/low", "--blue", { faint: true }), one("above", "clip_fraction/high", "--gold", { faint: true }),
    one("dual", "clip_fraction/dual", "--red", { faint: true }),
    one("below band", "clip_fraction/band_low", "--blue"), one("above band", "clip_fraction/band_high", "--red"),
  ],
  { zero: true, height: 190 },
);
if (host("chart-correction")) {
  drawLines(
    "chart-correction",
    [
      one("effective", "sampler_correction/effective_share", "--green"),
      one("weight cut", "sampler_correction/truncated", "--gold"), one("left out", "sampler_correction/masked", "--red"),
    ],
    { zero: true, height: 190 },
  );
}
drawLines("chart-entropy", [one("entropy", "entropy", "--teal")], { zero: true, height: 190 });
drawLines(
  "chart-kl",
  [one("to the reference", "kl", "--green"), one("to the weights that sampled", "kl_old", "--slate")],
  { zero: true, height: 190 },
);
const counted = ["groups/used", "groups/surplus", "groups/ungraded"].map(column);
const dropped = column("groups/total").map((total, i) => total - counted.reduce((sum, values) => sum + (values[i] || 0), 0));
stackedBars(
  host("chart-groups"),
  DATA.steps,
  [
    { name: "used", color: css("--teal"), y: column("groups/used") },
    { name: "dropped, all rewards equal", color: css("--faint"), y: dropped },
    { name: "with signal, not needed", color: css("--gold"), y: column("groups/surplus") },
    { name: "not graded", color: css("--red"), y: column("groups/ungraded") },
  ],
  { height: 190 },
);
drawLines(
  "chart-failures",
  [
    one("failed", "rollouts/failed", "--red"),
    one("reissued after a lost worker", "rollouts/reissued", "--gold"),
    one("cut at the length limit", "rollouts/truncated", "--slate"),
    one("ended at environment.max_turns", "turns/limited", "--teal"),
    one("left out because they were cut", "rollouts/masked", "--violet"),
  ],
  { zero: true, height: 190 },
);
