"""Judge Kubernetes' files without a cluster: by the published schemas of its API, and by Kubeflow's models of its own.

    python manifests.py kubernetes/*.yaml
    pip install kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0     what it needs, from PyPI

A schema knows names and types of fields, not whether an image exists, a quota is left or a name is somebody's.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PACKAGES = {"kubernetes_validate": "kubernetes-validate==1.37.0", "kubeflow_trainer_api": "kubeflow-trainer-api==2.3.0"}


def why_not() -> str:
    """What keeps this machine from judging; "" if nothing does."""
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    return f"not installed: pip install {' '.join(missing)}" if missing else ""


def verdicts(path: Path) -> Iterator[str]:
    """A line for each document of a file."""
    for document in yaml.safe_load_all(path.read_text()):
        what = f"{path.name}: {document['kind']} {document['metadata']['name']}"
        flaw = flaw_of(document)
        yield f"{what}: {flaw}" if flaw else f"{what}: valid"


def flaw_of(document: dict[str, Any]) -> str:
    """The first field that is not as it must be, or ""."""
    return by_kubeflow(document) if document["apiVersion"].startswith("trainer.kubeflow.org/") else by_kubernetes(document)


def by_kubernetes(document: dict[str, Any]) -> str:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, "1.37", strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return ""


def by_kubeflow(document: dict[str, Any]) -> str:
    """Its models take any field; so what they have understood is held against what was written."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
    from pydantic import ValidationError

    try:
        understood = TrainerV1alpha1TrainJob.from_dict(document).to_dict()
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    lost = sorted(unknown(document, understood))
    return f"{lost[0]}: no such field" if lost else ""


def unknown(written: Any, understood: Any, where: str = "") -> Iterator[str]:
    if isinstance(written, dict):
        for name, value in written.items():
            if not isinstance(understood, dict) or name not in understood:
                yield f"{where}{name}"
            else:
                yield from unknown(value, understood[name], f"{where}{name}.")
    if isinstance(written, list):
        for index, (value, known) in enumerate(zip(written, understood, strict=True)):
            yield from unknown(value, known, f"{where}{index}.")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} FILE...")
    if reason := why_not():
        sys.exit(reason)
    found = [verdict for path in sys.argv[1:] for verdict in verdicts(Path(path))]
    print("\n".join(found))
    sys.exit(any(not verdict.endswith(": valid") for verdict in found))
