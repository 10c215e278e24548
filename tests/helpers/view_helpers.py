"""Viewers for tests: the API in this process, and real servers."""

import asyncio
import json
import threading
from contextlib import contextmanager
from urllib.parse import urlencode

import polars as pl
import pyarrow as pa

from pipelines.rewards import trajectory_returns
from pipelines.view.api import Api
from pipelines.view.app import Bundle, serving
from pipelines.view.sources import Sources
from rollout_io import scan

PAGE = (
    '<!doctype html><html><head><meta charset="utf-8" /><script type="module" crossorigin src="./assets/index.js"></script>'
    '<link rel="stylesheet" href="./assets/index.css"></head><body></body></html>'
)


def bundle_in(folder):
    """A built page with a script and a style."""
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text(PAGE)
    (folder / "assets" / "index.js").write_text("console.log('</script>')")
    (folder / "assets" / "index.css").write_text("body { color: black }")
    return Bundle.read(folder)


class Asked:
    """Asks an API about datasets and runs."""

    def __init__(self, *paths, tokenizer=None):
        self.sources = Sources.open([str(path) for path in paths], tokenizer)
        self.api = Api(self.sources)

    def __call__(self, path, **parameters):
        """JSON as objects, Arrow as a frame."""
        return self.decoded(self.api.answer(self.url(path, **parameters)))

    def table(self, path, **parameters):
        """Arrow with its metadata."""
        answer = self.api.answer(self.url(path, **parameters))
        return pa.ipc.open_stream(answer.body).read_all()

    @staticmethod
    def url(path, **parameters):
        return f"{path}?{urlencode(parameters)}"

    @staticmethod
    def decoded(answer):
        if answer.media_type == "application/json":
            return json.loads(answer.body.decode("utf-8"))
        return pl.from_arrow(pa.ipc.open_stream(answer.body).read_all())


@contextmanager
def server_of(api, bundle):
    """A real server in a thread of its own."""
    loop = asyncio.new_event_loop()
    ready, stop, found = threading.Event(), asyncio.Event(), []

    async def run():
        async with serving(api, bundle) as served:
            found.append(served)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


def response_tokens(path):
    """The sampled tokens of each row, as an expression."""
    response = pl.col("response_ids").list.len()
    if "segments" not in scan(path).collect_schema():
        return response
    lengths = pl.col("segments").list.eval(pl.element().struct.field("length")).list.sum()
    return pl.when(pl.col("segments").is_null()).then(response).otherwise(lengths)


def facts_of(path, *conditions):
    """Compute the numbers of the table of trajectories by other means: {trajectory: {column: value}}."""
    prompt, response = (pl.col(name).list.len() for name in ("prompt_token_ids", "response_ids"))
    rows = scan(path).filter(*conditions)
    ids = rows.select("trajectory_id").unique()
    returns = trajectory_returns(scan(path).join(ids, on="trajectory_id", how="semi"))
    folded = rows.group_by("trajectory_id", maintain_order=True).agg(
        num_rows=pl.len(),
        prompt_tokens=prompt.sum(),
        response_tokens=response_tokens(path).sum(),
        trained_tokens=pl.col("loss_mask").list.sum().sum(),
        longest_row_tokens=(prompt + response).max(),
    )
    known = returns.select("trajectory_id", "return")
    found = folded.join(known, on="trajectory_id", how="left", maintain_order="left").collect()
    return {line.pop("trajectory_id"): line for line in found.to_dicts()}
