"""Flower's privacy mods around our uploads: they clip and add noise to head and base."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping
from numpy.typing import NDArray

from pfedvem.algorithms import METHODS
from pfedvem.errors import UserError
from pfedvem.flower import wire
from tests.flower.conftest import SIZES, Place

Arrays = dict[str, NDArray[np.float32]]


class Eavesdropper:
    """A mod around the others that sees what really leaves a site, and what came."""

    def __init__(self) -> None:
        self.down: list[Arrays] = []
        self.up: list[Arrays] = []

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        came = {name: value.numpy() for name, value in message.content.array_records[wire.DOWN].items()}
        reply: Message = call_next(message, context)
        if not reply.has_error():
            self.down.append(came)
            self.up.append({name: value.numpy() for name, value in reply.content.array_records[wire.UP].items()})
        return reply


def length(down: Arrays, up: Arrays) -> float:
    """The norm of the change of all that was sent."""
    return float(np.sqrt(sum(float(np.square(up[name] - down[name]).sum()) for name in up)))


def quiet(clip: float) -> LocalDpMod:
    """Clipping with hardly any noise."""
    return LocalDpMod(clipping_norm=clip, sensitivity=1e-9, epsilon=1.0, delta=1e-5)


def test_head_and_base_together_are_clipped_before_they_leave_a_site(place: Place) -> None:
    seen = Eavesdropper()
    place.config |= {"rounds": 1, "algorithm.lr-base": 0.1}
    place.run(place.grid(place.app(mods=[seen, quiet(0.01)])))
    assert seen.up
    for down, up in zip(seen.down, seen.up, strict=True):
        assert set(up) == {"w", "theta.0.weight", "theta.0.bias"}
        assert length(down, up) == pytest.approx(0.01, rel=1e-3)
        assert all(not np.array_equal(up[name], down[name]) for name in up)


def test_noise_of_the_given_scale_is_added_to_head_and_base(place: Place) -> None:
    place.config |= {"rounds": 1}
    still, noisy = Eavesdropper(), Eavesdropper()
    place.run(place.grid(place.app(mods=[still])))
    place.config |= {"out": str(place.folder / "noisy"), "experiment": "noisy"}
    mod = LocalDpMod(clipping_norm=1e6, sensitivity=1.0, epsilon=10.0, delta=1e-5)
    place.run(place.grid(place.app(mods=[noisy, mod])))
    scale = np.sqrt(2 * np.log(1.25 / 1e-5)) / 10
    for name in ("w", "theta.0.weight"):
        noise = np.concatenate([(b[name] - a[name]).ravel() for a, b in zip(still.up, noisy.up, strict=True)])
        assert 0.6 * scale < float(noise.std()) < 1.5 * scale


def test_a_site_that_does_not_upload_is_not_disturbed_by_the_mods(place: Place) -> None:
    place.config |= {"participation": 0.01, "rounds": 2}
    place.run(place.grid(place.app(mods=[quiet(1.0)])))
    status = json.loads((place.folder / "out" / "federation.json").read_text())
    assert [site["replied"] for site in status["sites"]] == [2] * len(SIZES)
    assert status["notes"] == []


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"scaffold", "ifca", "local"}))
def test_the_mods_take_the_uploads_of_every_method_that_sends_back_what_it_got(name: str, place: Place) -> None:
    place.config |= {"method": name, "rounds": 1}
    place.run(place.grid(place.app(mods=[quiet(1.0)])))
    assert json.loads((place.folder / "out" / "federation.json").read_text())["notes"] == []


@pytest.mark.parametrize("name", ["scaffold", "ifca"])
def test_uploads_of_another_kind_are_refused_by_the_mods_and_not_sent_unprotected(name: str, place: Place) -> None:
    """SCAFFOLD sends changes and IFCA one network for several: clipping them against what was sent has no meaning."""
    place.config |= {"method": name, "rounds": 1, "min-replies": 1}
    seen = Eavesdropper()
    with pytest.raises(Exception, match="usable replies"):
        place.run(place.grid(place.app(mods=[seen, quiet(1.0)])))
    assert seen.up == []


def test_clipping_at_the_sites_goes_with_noise_at_the_server_and_the_noise_is_kept(place: Place) -> None:
    place.config |= {"rounds": 2, "participation": 1.0}

    def noisy(strategy: Any) -> Any:
        return DifferentialPrivacyClientSideFixedClipping(
            strategy, noise_multiplier=1.0, clipping_norm=0.5, num_sampled_clients=len(SIZES)
        )

    seen = Eavesdropper()
    result = place.run(place.grid(place.app(mods=[seen, fixedclipping_mod])), wrap=noisy)
    assert all(length(down, up) <= 0.5 + 1e-4 for down, up in zip(seen.down, seen.up, strict=True))
    last = seen.up[-len(SIZES) :]
    span = np.stack([up["w"] for up in last])
    # Without noise the merged head lies between the uploads; the noise of the server takes it out of there.
    merged = result.state.server.w.numpy()
    assert bool(((merged < span.min(0)) | (merged > span.max(0))).any())
    assert torch.isfinite(result.state.server.w).all()


def test_secure_aggregation_that_would_mask_nothing_is_refused(place: Place) -> None:
    with pytest.raises(UserError, match="secaggplus_mod would let our uploads pass unmasked"):
        place.app(mods=[secaggplus_mod])
