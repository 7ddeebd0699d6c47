"""Three sites that read digits. Every site has the digits of its own people, and they stay with it.

With ``data-root`` in its --node-config, a site has the MNIST digits of one writer, from a local copy that says who
wrote what (`pfedvem data list`); without, its part of scikit-learn's digits, five of the ten labels.
"""

from flwr.app import Context
from torch import nn

from pfedvem.data import load_federation
from pfedvem.data.federation import Federation
from pfedvem.data.settings import DataSettings
from pfedvem.flower import client_app, server_app
from pfedvem.networks import mlp


def data(context: Context) -> Federation:
    """This site's samples."""
    root, clients = context.node_config.get("data-root"), int(context.run_config["clients"])
    chosen = (
        DataSettings(dataset="digits", clients=clients)
        if root is None
        else DataSettings(
            dataset="mnist-writers", root=root, partition="natural", client_column="writer", clients=clients
        )
    )
    return load_federation(chosen, seed=0).only(int(context.node_config["partition-id"]))


def network() -> nn.Module:
    """Pictures of any size are brought to 8x8 and read by a network with one hidden layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(8), *mlp((1, 8, 8), classes=10))


client = client_app(data, network)
server = server_app(network)
