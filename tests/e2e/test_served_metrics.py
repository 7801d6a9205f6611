"""`/metrics` of `omni up` serves the metrics of the list, of every process, and no other."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from omnipipeline_spec.types import metrics
from stage_runtime.metrics import catalog
from stage_runtime.processes.one_machine.local import LocalPipeline
from tests.e2e.local_pipelines import PATIENCE_S, Client, eventually


async def test_omni_up_serves_every_metric_of_the_list_with_its_labels_and_no_other(
    shared: LocalPipeline, client: Client
) -> None:
    await client.answer("a b", size=1 << 20)
    incarnations = {f"{one['group']}.{one['incarnation']}" for one in (await client.status())["instances"]}
    found: dict[str, frozenset[str]] = {}
    processes: set[str] = set()
    wanted = metrics.series([*catalog.COORDINATOR, *catalog.PLANES])

    async def of_all_processes() -> bool:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            text = (await http.get(f"{shared.url}/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        found.update({sample.name: frozenset(sample.labels) for sample in samples})
        processes.update(sample.labels["process"] for sample in samples if "process" in sample.labels)
        return processes >= incarnations and found.keys() >= wanted.keys()

    await eventually(of_all_processes, what=lambda: f"these are missing: {wanted.keys() - found.keys()}")
    assert found == wanted
    assert processes == incarnations | {"coordinator"}
