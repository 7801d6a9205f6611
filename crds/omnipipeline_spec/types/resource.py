"""The names of the resource: API group, version, kind, plural, and the annotation of a converted class.

Here: the strings alone, once. Called by `loading`, `generating` and tests.
"""

from __future__ import annotations

from typing import Final

GROUP: Final = "omnipipeline.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "OmniPipeline"
PLURAL: Final = "omnipipelines"
#: Names the subclass of `PipelineConfig` that a resource was made from. A note; nothing imports it.
CLASS_ANNOTATION: Final = f"{GROUP}/config-cls"
