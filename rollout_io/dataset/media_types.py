"""Kinds of pictures, documents and recordings, by their first bytes."""

from __future__ import annotations

import re

OTHER = ".bin"
_STARTS = (
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"\xff\xd8\xff", ".jpg"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\x00", ".tiff"),
    (b"MM\x00*", ".tiff"),
    (b"%PDF-", ".pdf"),
    (b"ID3", ".mp3"),
    (b"OggS", ".ogg"),
    (b"fLaC", ".flac"),
)
_RIFF = {b"WEBP": ".webp", b"WAVE": ".wav", b"AVI ": ".avi"}
_BOXES = {b"avif": ".avif", b"heic": ".heic", b"mif1": ".heic"}
MEDIA_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".avif": "image/avif",
    ".heic": "image/heic",
    ".bmp": "image/bmp",
    ".tiff": "image/tiff",
    ".svg": "image/svg+xml",
    ".pdf": "application/pdf",
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".ogg": "audio/ogg",
    ".flac": "audio/flac",
    ".mp4": "video/mp4",
    ".avi": "video/x-msvideo",
}
"""Media type by file extension."""


def extension_of(content: bytes) -> str:
    """Return the file extension for the first bytes of a file, which alone determine it.

    Example:
        >>> extension_of(b"GIF89a...")
        '.gif'
    """
    if content[:4] == b"RIFF":
        return _RIFF.get(content[8:12], OTHER)
    if content[4:8] == b"ftyp":
        return _BOXES.get(content[8:12], ".mp4")
    if re.match(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?<svg[\s>]", content[:1024], re.DOTALL):
        return ".svg"
    return next((name for start, name in _STARTS if content.startswith(start)), OTHER)
