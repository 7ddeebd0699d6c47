"""The one file that a site changes: where its data come from, and the network that all sites train.

Everything else is in pfedvem. What a site keeps (its posterior) and its data never leave it; what it sends is said by
`pfedvem methods`.
"""

from flwr.app import Context
from torch import nn

from pfedvem.data import load_federation
from pfedvem.data.federation import Federation
from pfedvem.data.settings import DataSettings
from pfedvem.flower import client_app, server_app
from pfedvem.networks import mlp


def data(context: Context) -> Federation:
    """This site's samples. The handwritten digits stand in for them: site N has those of the N-th of all sites.

    With data of your own, give four arrays: inputs (N, ...) as float32 and labels (N,) from 0, to train and to test:

        return Federation.from_clients([(x_train, y_train, x_test, y_test)], classes=CLASSES)
    """
    everyone = load_federation(DataSettings(dataset="digits", clients=int(context.run_config["clients"])), seed=0)
    return everyone.only(int(context.node_config["partition-id"]))


def network() -> nn.Module:
    """Any network that ends in a linear layer, which becomes the Bayesian head. The same at all sites."""
    return mlp((1, 8, 8), classes=10)


client = client_app(data, network)
server = server_app(network)
