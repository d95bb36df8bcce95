"""The `data:` section of the configuration. Owns names and ranges only; imports neither torch nor ray."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class DataOptions(BaseModel, frozen=True, extra="forbid"):
    """Where prompts come from and how they become tokens."""

    train: Annotated[str, Field(description="JSON lines (.jsonl, .jsonl.gz), Parquet, or a dataset directory")]
    eval: Annotated[str | None, Field(description="held-out prompts in any of the same forms")] = None
    train_split: Annotated[str | None, Field(description="split of a dataset directory; default: train")] = None
    eval_split: Annotated[
        str | None,
        Field(description="split of a directory; default: the first of test, validation, valid, val, dev, eval"),
    ] = None
    prompt_field: Annotated[str, Field(description="record field with the text, or with a list of messages")] = "prompt"
    answer_field: Annotated[str, Field(description="record field handed to the reward")] = "answer"
    id_field: Annotated[str | None, Field(description="record field with a unique id; default: line order")] = None
    system_prompt: Annotated[str | None, Field(description="prepended as a system message")] = None
    template: Annotated[
        Literal["chat", "plain"], Field(description="chat: the tokenizer's chat template; plain: the text as it is")
    ] = "chat"
    chat_template: Annotated[str | None, Field(description="Jinja template used instead of the tokenizer's")] = None
    max_prompt_tokens: Annotated[int, Field(ge=1, description="longer prompts are dropped, counted, reported")] = 1024
    on_bad_line: Annotated[Literal["fail", "skip"], Field(description="malformed records")] = "fail"
    shuffle: Annotated[bool, Field(description="a new deterministic order every epoch")] = True
    limit: Annotated[int | None, Field(ge=1, description="use the first N records only")] = None
