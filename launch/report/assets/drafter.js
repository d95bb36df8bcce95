"use strict";
// The section on drafter training. Drawn only where the page has the section.

if (DATA.drafter) {
  const D = DATA.drafter;
  const curve = (label, name, color, more = {}) => ({ name: label, color: css(color), x: D.curve.x, y: D.curve[name], ...more });
  const marks = D.curve.marks.map(([x, version]) => ({ x, label: `target ${version}` }));
  const top3 = curve("top 3", "top3_accuracy", "--violet", { faint: true });
  const top1 = curve("top 1", "accuracy", "--teal", { faint: true });
  lineChart(
    host("chart-drafter-accuracy"),
    [
      { ...top3, quiet: true },
      { ...top1, quiet: true },
      { ...top3, name: "top 3, smoothed", faint: false, y: smooth(top3.y, 0.4) },
      { ...top1, name: "top 1, smoothed", faint: false, y: smooth(top1.y, 0.4) },
    ],
    { height: 260, title: "micro-step", marks },
  );
  lineChart(host("chart-drafter-loss"), [curve("loss", "loss", "--orange")], { height: 190, title: "micro-step", marks });
  const line = (label, values, color) => ({ name: label, color: css(color), x: D.steps, y: values });
  lineChart(host("chart-drafter-length"), [line("accept length", D.accept_length, "--violet")], { height: 190 });
  const shades = ["--teal", "--blue", "--violet", "--pink", "--orange", "--gold"];
  lineChart(
    host("chart-drafter-positions"),
    D.positions.map((values, i) => line(`position ${i + 1}`, values, shades[i % shades.length])),
    { zero: true, height: 190 },
  );
  const colors = { busy: "--teal", training: "--gold", idle: "--idle", other: "--slate" };
  stackedBars(
    host("chart-drafter-time"),
    D.time.steps,
    Object.keys(colors).map((name) => ({ name, color: css(colors[name]), y: D.time[name] })),
    { height: 190, unit: " %" },
  );
  const V = D.versions;
  const count = (label, name, color) => ({ name: label, color: css(color), x: V.steps, y: V[name] });
  lineChart(
    host("chart-drafter-steps"),
    [count("micro-steps", "micro_steps", "--gold"), count("preempted", "preempted", "--slate"), count("rolled back", "rolled_back", "--red")],
    { zero: true, height: 190 },
  );
}
