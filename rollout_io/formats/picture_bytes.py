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
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from rollout_io.dataset.blobs import IMAGES, MEDIA_TYPES, RULE, SUFFIX, extension_of, stores_of
from rollout_io.dataset.storage import PathLike
from schemas.errors import InvariantError


class PictureBytes:
    """Restores the bytes of pictures in messages.

    Args:
        dataset: The dataset whose store has the pictures.
    """

    def __init__(self, dataset: PathLike) -> None:
        self._dataset, self._stores = dataset, stores_of(dataset)

    def restored_in(self, table: pa.Table) -> pa.Table:
        """Return a table whose `messages` have the bytes, without the column `images`."""
        if IMAGES not in table.column_names:
            return table
        if "messages" in table.column_names:
            texts = [self.restored(text) for text in table.column("messages").to_pylist()]
            at = table.column_names.index("messages")
            table = table.set_column(at, "messages", pa.array(texts, pa.string()))
        return table.drop_columns([IMAGES])

    def restored(self, text: str | None) -> str | None:
        """Return the JSON of messages with the bytes of all pictures.

        Raises:
            InvariantError: `image_reference`: a picture is missing or was changed.
        """
        if text is None or '"blob"' not in text:
            return text
        return json.dumps(self.in_messages(json.loads(text)), ensure_ascii=False)

    def in_messages(self, value: Any) -> Any:
        """Return messages with the bytes of all pictures."""
        if isinstance(value, list):
            return [self.in_messages(each) for each in value]
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("blob"), str) and "type" in value:
            return self._part(value)
        return {
            k: self.in_messages(v) if k in {"content", "output"} else v for k, v in value.items()
        }

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        name = part["blob"]
        store = next((store for store in self._stores if name in store.files), None)
        content = None if store is None else store.read(name)
        if content is None:
            got, hint = (
                f"the file {name} is missing or was changed",
                f"move DS{SUFFIX} together with DS",
            )
            raise InvariantError(RULE, str(self._dataset), got, "", hint)
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
