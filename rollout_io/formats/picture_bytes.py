"""Pictures in exported messages: their bytes as data URLs, as OpenAI's chat API takes them.

{"type": "image", "blob": "sha256:..."}    in a dataset
{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}    exported
{"type": "file", "file": {"file_data": "data:application/pdf;base64,...", "filename": "a.pdf"}}
{"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}
{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.dataset.blobs import RULE, SUFFIX, stores_of
from rollout_io.dataset.media_types import MEDIA_TYPES, extension_of
from rollout_io.dataset.storage import PathLike
from schemas.columns import PICTURES
from schemas.errors import InvariantError
from schemas.ragged import relisted

IMAGES = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
"""Pictures as `datasets` and verl read them."""


class PictureBytes:
    """Restores the bytes of pictures in messages."""

    def __init__(self, dataset: PathLike) -> None:
        self._dataset, self._stores = dataset, stores_of(dataset)

    def restored_in(self, table: pa.Table) -> pa.Table:
        """Return a table whose `messages` have the bytes, without the column `pictures`.

        The same applies to the steps of merged rows, in `segments`.
        """
        if PICTURES in table.column_names:
            if "messages" in table.column_names:
                table = _replaced(table, "messages", self._texts(table.column("messages")))
            table = table.drop_columns([PICTURES])
        if "segments" not in table.column_names:
            return table
        column = table.column("segments").combine_chunks()
        if not {PICTURES, "messages"} & {f.name for f in column.type.value_type}:
            return table
        lists = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
        return _replaced(table, "segments", self._segments(lists))

    def _segments(self, lists: pa.ListArray) -> pa.ListArray:
        steps = pc.list_flatten(lists)
        fields = {f.name: pc.struct_field(steps, f.name) for f in steps.type}
        fields.pop(PICTURES, None)
        if "messages" in fields:
            fields["messages"] = self._texts(fields["messages"])
        return relisted(lists, pa.StructArray.from_arrays([*fields.values()], [*fields]))

    def _texts(self, column: pa.ChunkedArray | pa.Array) -> pa.Array:
        return pa.array([self.restored(text) for text in column.to_pylist()], pa.string())

    def restored(self, text: str | None) -> str | None:
        """Return the JSON of messages with the bytes of all pictures."""
        if text is None or '"blob"' not in text:
            return text
        return json.dumps(with_parts(json.loads(text), self._part), ensure_ascii=False)

    def in_messages(self, value: Any) -> Any:
        """Return messages with the bytes of all pictures."""
        return with_parts(value, self._part)

    def content(self, name: str) -> bytes:
        """Return the content of a file of the store.

        Raises:
            InvariantError: `picture_reference`: the file is missing, or its content was changed.
        """
        store = next((store for store in self._stores if name in store.files), None)
        content = None if store is None else store.read(name)
        if content is None:
            finding, hint = (
                f"the file {name} is missing or was changed",
                f"move DS{SUFFIX} together with DS",
            )
            raise InvariantError(RULE, str(self._dataset), finding, "", hint)
        return content

    def apart(self, messages: Any) -> tuple[Any, list[dict[str, Any]]]:
        """Return messages without the references of their pictures, and the pictures, in order."""
        images = list[dict[str, Any]]()

        def without_reference(part: Mapping[str, Any]) -> dict[str, Any]:
            images.append({"bytes": self.content(part["blob"]), "path": None})
            return {"type": part["type"]}

        return with_parts(messages, without_reference), images

    def images_in(self, table: pa.Table) -> pa.Array:
        """[N] Return the pictures of each row as `IMAGES`, in order; null if it has none in the store."""
        rows = table.column(PICTURES).to_pylist()
        stored = [[e["sha256"] for e in row or () if e["sha256"] is not None] for row in rows]
        images = [[image for name in names if (image := self._image(name))] for names in stored]
        return pa.array([row or None for row in images], IMAGES)

    def _image(self, name: str) -> dict[str, Any] | None:
        content = self.content(name)
        is_image = MEDIA_TYPES.get(extension_of(content), "").startswith("image/")
        return {"bytes": content, "path": None} if is_image else None

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        content = self.content(part["blob"])
        kind, data = part["type"], base64.b64encode(content).decode()
        mime = part.get("media_type") or MEDIA_TYPES.get(extension_of(content))
        url = f"data:{mime or 'application/octet-stream'};base64,{data}"
        if kind in {"image", "video"}:
            return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
        if kind == "audio":
            sound = {"data": data, "format": str(mime).rpartition("/")[2]}
            return {"type": "input_audio", "input_audio": sound}
        named = {"filename": part["name"]} if "name" in part else {}
        return {"type": "file", "file": {"file_data": url, **named}}


def with_parts(value: Any, replaced: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return messages with another value for each part that refers to a file of the store."""
    if isinstance(value, list):
        return [with_parts(inner, replaced) for inner in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("blob"), str) and "type" in value:
        return replaced(value)
    return {
        k: with_parts(v, replaced) if k in {"content", "output"} else v for k, v in value.items()
    }


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)
