"""What is watched between evaluations: the global model, whose accuracy depends on who happens to upload in a round, by
points; and whether training diverges.
"""

from __future__ import annotations

from pfedvem import tree
from pfedvem.data.federation import Federation
from pfedvem.errors import UserError
from pfedvem.experiments.config import Config
from pfedvem.models import Params
from pfedvem.networks import build
from pfedvem.simulation.rounds import State, global_model
from pfedvem.simulation.work import Setup, score_general

RECENT = 10  # rounds whose mean accuracy says more of a global model than the last


def recent(rounds: int) -> int:
    """Over how many last rounds a trial's global model is judged: ten, but of a short trial a quarter."""
    return min(RECENT, max(1, rounds // 4))


def refuse_divergence(state: State) -> None:
    """Ends a run whose server is no longer finite; clients that overflow are left out before that."""
    if not bool(tree.finite(tree.expand(state.server, 1)).all()):
        raise UserError(f"Training diverged in round {state.round}. Try a smaller learning rate.")


class Probe:
    """Tests global models of a run, after any round."""

    def __init__(self, config: Config, federation: Federation) -> None:
        model = build(config.network, federation.shape, len(federation.classes), config.seed)
        self._setup = Setup(config.algorithm, model, federation, config.seed, config.device, config.guard, gm=config.gm)

    def global_model(self, state: State) -> float | None:
        """The accuracy of the global model, in percent; None where the method has none."""
        return self.accuracy(global_model(self._setup, state.server, state.average))

    def accuracy(self, general: Params | None) -> float | None:
        """In percent, on the complete test data; None where there is no such model."""
        return None if general is None else round(100 * score_general(self._setup, general).accuracy, 4)
