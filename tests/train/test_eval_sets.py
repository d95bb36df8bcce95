"""Several held-out sets in one evaluation, and several to train on, in a run without Ray."""

from tests.train.conftest import Runs

QUICK = ("run.steps=1", "rollout.prompts_per_step=2", "rollout.rollouts_per_prompt=2")


def sets(runs: Runs) -> str:
    data = runs.root / "data"
    return (
        f"eval.sets=[{{name: held, path: {data}/eval.jsonl, samples: 3, limit: 6}}, "
        f"{{name: short, path: {data}/train.jsonl, limit: 4, max_new_tokens: 5, temperature: 0.0}}, "
        f"{{name: narrow, path: {data}/eval.jsonl, limit: 6, samples: 3, top_k: 1, source_field: answer}}]"
    )


def test_a_set_has_the_tokens_that_it_has_alone_and_its_own_sampling(runs: Runs) -> None:
    together = runs.alone(*QUICK, "data.eval=null", sets(runs), "eval.at=[1, 3]")
    alone = runs.alone(*QUICK, "data.limit=6", "eval.samples=3")
    for found, wanted in zip(together.evaluations, alone.evaluations, strict=True):
        assert found["eval/held/reward"] == wanted["eval/reward"]
        assert found["eval/held/length_mean"] == wanted["eval/length_mean"]
        assert found["eval/held/pass@3"] == wanted["eval/pass@3"]
        assert 0 < found["eval/short/length_mean"] <= 5
        assert found["eval/narrow/pass@3"] == found["eval/narrow/pass@1"], "the likeliest token always: three times one"
        sources = [name for name in found if name.startswith("eval/narrow/source/")]
        assert len(sources) >= 3
        names = ("held", "short", "narrow")
        assert abs(found["eval/reward"] - sum(found[f"eval/{name}/reward"] for name in names) / 3) < 1e-12
        assert "eval/pass@3" not in found, "the set short has one response to a prompt"


def test_a_step_has_its_shares_of_the_sets_it_trains_on(runs: Runs) -> None:
    data = runs.root / "data"
    sets = (
        f"data.sets=[{{name: much, path: {data}/train.jsonl, limit: 8, weight: 3}}, "
        f"{{name: little, path: {data}/eval.jsonl, limit: 5}}]"
    )
    given = ("data.train=null", "data.eval=null", sets, "run.steps=3")
    for row in runs.alone(*given).rows:
        assert (row["data/much/prompts"], row["data/little/prompts"]) == (3.0, 1.0)
        mean = (3 * row["data/much/reward"] + row["data/little/reward"]) / 4
        assert abs(mean - row["reward/mean"]) < 1e-9
    passed_over = runs.alone(*given, "rollout.skip={target: 0.5, keep: 0.01}").rows
    assert all("skip/share" in row for row in passed_over)
