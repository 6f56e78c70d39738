"""Messages with images: TRL's `prepare_multimodal_messages`."""

from __future__ import annotations

from typing import Any

_ROLES = ("system", "user", "assistant", "tool")


def prepare_multimodal_messages(messages: list[dict[str, Any]], images: list | None = None) -> list[dict[str, Any]]:
    """Turn the content of messages into lists of parts, and put `images` at their placeholders.

    Text becomes a part of its own; where the first message of the user is text, all images go before it. A part
    `{"type": "image"}` without an image is a placeholder, except in a tool's message.

    Raises:
        ValueError: an unknown role, or another number of placeholders than of images.
    """
    waiting, images = iter(images or ()), list(images or ())
    messages = _in_parts(messages, len(images))
    places = sum(_is_place(part) for message in messages for part in _parts_with_places(message))
    if places != len(images):
        raise ValueError(
            f"Number of images provided ({len(images)}) does not match number of image placeholders ({places})."
        )

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "image": next(waiting)} if _is_place(part) else part

    return [
        {**message, "content": [filled(part) for part in parts]} if (parts := _parts_with_places(message)) else message
        for message in messages
    ]


def _in_parts(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    converted = []
    for message in messages:
        if message["role"] not in _ROLES:
            raise ValueError(f"Invalid role in message: {message['role']}. Expected {', '.join(_ROLES)}.")
        content = message.get("content")
        if isinstance(content, str):
            before, text = [], {"type": "text", "text": content}
            if message["role"] == "user":
                before, images = [{"type": "image"} for _ in range(images)], 0
            message = {**message, "content": [*before, text]}
        converted.append(message)
    return converted


def _parts_with_places(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if message["role"] == "tool" else message.get("content") or []


def _is_place(part: dict[str, Any]) -> bool:
    return part["type"] == "image" and "image" not in part
