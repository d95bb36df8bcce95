"use strict";
// The section on the token budget. Drawn only where the page has the section, and only the charts that it has.

if (DATA.token_budget) {
  const B = DATA.token_budget;
  const R = B.rollouts;
  const percent = (name) => column(name).map((v) => (finite(v) ? 100 * v : null));
  const drawn = (id, series, options) => host(id) && lineChart(host(id), series, options);
  const band = (name, low, high, opacity) => ({ name, color: css("--teal"), x: R.x, y: high, low, opacity });
  drawn(
    "chart-budget-rollouts",
    [
      band("all prompts", R.min, R.max, 0.14),
      band("10 to 90 %", R.p10, R.p90, 0.22),
      band("25 to 75 %", R.p25, R.p75, 0.34),
      { name: "mean", color: css("--slate"), x: R.x, y: R.mean, dash: "4 4" },
    ],
    { zero: true, height: 290 },
  );
  drawn(
    "chart-budget-tokens",
    [
      one("spent", "budget/spent_tokens", "--teal"),
      one("planned", "budget/planned_tokens", "--slate", { dash: "4 4" }),
      one("budget", "budget/tokens", "--orange", { dash: "2 3", faint: true }),
    ],
    { zero: true, height: 190 },
  );
  drawn(
    "chart-budget-variance",
    [
      one("uniform counts, same tokens", "budget/variance", "--slate", { y: B.variance.map((v) => v && 1), dash: "4 4" }),
      one("as allocated", "budget/variance", "--teal", { y: B.variance }),
      one("no allocation below", "budget/variance", "--red", { y: B.least_variance, dash: "4 4", faint: true }),
    ],
    { height: 190 },
  );
  drawn(
    "chart-budget-thresholds",
    [
      one("given up at", "abort/give_up_at", "--red"),
      one("answers end it from", "abort/poll_from", "--blue"),
      one("median natural length", "abort/natural_p50", "--teal", { dash: "4 4", faint: true }),
      one("90 %", "abort/natural_p90", "--violet", { dash: "4 4", faint: true }),
    ],
    { zero: true, height: 190, unit: " tokens" },
  );
  drawn(
    "chart-budget-ends",
    [
      one("after their answer", "abort/answered_share", "--teal", { y: percent("abort/answered_share") }),
      one("given up", "abort/given_up_share", "--red", { y: percent("abort/given_up_share") }),
      one("late, and kept", "abort/kept_late_share", "--gold", { y: percent("abort/kept_late_share") }),
    ],
    { zero: true, height: 190, unit: " %" },
  );
  drawn(
    "chart-budget-keep",
    [one("mean", "abort/keep_mean", "--gold"), one("least", "abort/keep_min", "--slate", { faint: true })],
    { zero: true, height: 190 },
  );
  drawn("chart-budget-surcharge", [one("mean squared weight", "abort/surcharge", "--orange")], { height: 190 });
  drawn("chart-budget-saved", [one("saved", "abort/saved_tokens", "--green")], { zero: true, height: 190 });
  drawn(
    "chart-budget-skipped",
    [one("passed over", "skip/share", "--violet", { y: percent("skip/share") })],
    { zero: true, height: 190, unit: " %" },
  );
}
