"""Turns encoded images into one uint8 array (N, C, H, W)."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pfedvem.errors import UserError

Encoded = bytes | str  # the bytes of an image file, or the path of one
_GREY = ("L", "1")


def decode(files: Sequence[Encoded], size: int | None = None, colour: bool = False) -> NDArray[np.uint8]:
    """Decodes images to (N, 1, H, W) if all of them are grey, else, or with ``colour``, to (N, 3, H, W).

    With a size, the centre square of each is resized to it; without one, all must have the same size.
    """
    mode = "RGB" if colour else "L"
    out: NDArray[np.uint8] | None = None
    for i, file in enumerate(files):
        try:
            with Image.open(file if isinstance(file, str) else io.BytesIO(file)) as image:
                if mode == "L" and image.mode not in _GREY:
                    return decode(files, size, colour=True)  # one image of colour makes all of them colour
                pixels = _pixels(image, mode, size)
        except UserError:
            raise
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"Image {i} of the data set cannot be read ({error}); mend or remove it.") from error
        if out is None:
            out = np.empty((len(files), *pixels.shape), dtype=np.uint8)
        if pixels.shape != out.shape[1:]:
            a, b = ("x".join(map(str, shape[:2])) for shape in (out.shape[1:], pixels.shape))
            raise UserError(f"The images have different sizes ({a} and {b}); resize them, or give image_size.")
        out[i] = pixels
    if out is None:
        raise UserError("The data set has no images.")
    return np.ascontiguousarray(out.transpose(0, 3, 1, 2))


def _pixels(image: Image.Image, mode: str, size: int | None) -> NDArray[np.uint8]:
    """One image as (H, W, C)."""
    if image.mode.startswith(("I", "F")):
        raise UserError(f"Images with pixels of kind {image.mode} are not supported; convert them to 8 bits a channel.")
    if size is not None and min(image.size) > 2 * size:
        image.draft(mode, (2 * size, 2 * size))  # lets JPEG skip detail that the resize would throw away
    shown = image if image.mode == mode else image.convert(mode)
    if size is not None and shown.size != (size, size):
        side = min(shown.size)
        left, top = ((length - side) // 2 for length in shown.size)
        square = shown.crop((left, top, left + side, top + side))
        shown = square.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(shown)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels
