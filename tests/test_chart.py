"""The chart for Kubernetes: rendered by Go's own template library, and checked by the schemas of Kubernetes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from uma_trio.config.options import OPTIONS

CHART = Path(__file__).resolve().parent.parent / "packaging" / "helm" / "uma-trio"
WHY = (
    "needs `pip install go-template kubernetes-validate`; there is no helm among Python's packages"
)


def rendered(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Return the documents of the chart by their kind, as `helm template` makes them."""
    go_template = pytest.importorskip("go_template", reason=WHY)
    values = {**yaml.safe_load((CHART / "values.yaml").read_text()), **changes}
    told = tmp_path / "values.yaml"
    told.write_text(yaml.safe_dump({"Values": values, "Release": {"Name": "fleet"}}))
    found = {}
    for template in sorted((CHART / "templates").iterdir()):
        made = tmp_path / template.name
        go_template.render_template(str(template), str(told), str(made))
        for document in yaml.safe_load_all(made.read_text()):
            if document is not None:
                found[document["kind"]] = document
    return found


def test_the_chart_fits_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    """Every document that Kubernetes itself knows, without a field that it does not."""
    validate = pytest.importorskip("kubernetes_validate", reason=WHY)
    found = rendered(tmp_path)
    assert set(found) == {"Deployment", "Service", "InferencePool"}
    for kind in ("Deployment", "Service"):
        validate.validate(found[kind], validate.latest_version(), strict=True)
    assert "InferencePool" not in rendered(tmp_path, inferencePool=False)


def test_the_daemon_of_the_chart_is_started_with_flags_that_it_has(tmp_path: Path) -> None:
    """A renamed option would leave a chart that does not start."""
    pod = rendered(tmp_path, slots=3)["Deployment"]["spec"]["template"]["spec"]
    verb, *flags = pod["containers"][0]["args"]
    known = {option.flag for option in OPTIONS}
    assert verb == "serve"
    assert {flag.partition("=")[0] for flag in flags} <= known
    assert "--parallel=3" in flags
    assert pod["terminationGracePeriodSeconds"] > 120 + 5
    paths = {
        pod["containers"][0][probe]["httpGet"]["path"]
        for probe in ("readinessProbe", "livenessProbe")
    }
    assert paths == {"/health?ready"}
    assert shlex.split(pod["initContainers"][0]["command"][2])[1] == "077", "keys are private"


def test_the_picker_is_told_of_metrics_that_there_are() -> None:
    """The names in the router's settings are those of /metrics/router."""
    from uma_trio.api.status import router_metrics
    from uma_trio.service.load import LoadReading, NodeLoad

    text = (CHART.parent / "values-llm-d.yaml").read_text()
    served = router_metrics(LoadReading(NodeLoad(slots=1)))
    plugins = yaml.safe_load(
        yaml.safe_load(text)["router"]["epp"]["pluginsCustomConfig"]["uma-trio.yaml"]
    )
    (extractor,) = [one for one in plugins["plugins"] if one["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    names = [value for key, value in engine.items() if key.endswith("Spec")]
    names += [one["metricSpec"] for one in engine["customMetrics"]]
    assert len(names) == 5
    for name in names:
        assert f"\n{name}" in f"\n{served}", name
