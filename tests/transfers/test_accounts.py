"""The bytes that an edge has sent, by relay."""

from __future__ import annotations

from stage_runtime.transfers.accounts import Accounts, InFlightTransfer


def test_an_edge_is_counted_by_the_relay_that_carried_it() -> None:
    accounts = Accounts()
    accounts.sent(("a", "b", "peer"), "nixl", 5, 4)
    accounts.sent(("a", "b", "peer"), "nixl", 5, 0)
    accounts.sent(("a", "b", "peer"), "tcp", 7, 7)
    accounts.sent(("a", "b", "other"), "nixl", 1, 1)
    numbers = accounts.numbers([InFlightTransfer(("a", "b", "tcp"), 0.0, aborted=True)])
    by_nixl, by_tcp = numbers["a", "b", "nixl"], numbers["a", "b", "tcp"]
    assert (by_nixl.nbytes, by_nixl.copied_nbytes, by_nixl.failovers, by_nixl.in_flight) == (11, 5, 0, 0)
    assert (by_tcp.nbytes, by_tcp.failovers, by_tcp.in_flight, by_tcp.quarantined) == (7, 1, 1, 1)
    assert by_tcp.oldest_s > 0


def test_payloads_of_requests_that_are_tried_again_are_counted() -> None:
    accounts = Accounts()
    for retried in (False, True, True):
        accounts.sent(("a", "b", "peer"), "tcp", 5, 4, retried=retried)
    assert accounts.numbers([])["a", "b", "tcp"].retries == 2


def test_a_peer_that_comes_back_is_no_failover() -> None:
    accounts = Accounts()
    accounts.sent(("a", "b", "peer"), "tcp", 5, 4)
    accounts.forget([("a", "b", "peer")])
    accounts.sent(("a", "b", "peer"), "nixl", 5, 4)
    assert accounts.numbers([])["a", "b", "nixl"].failovers == 0
