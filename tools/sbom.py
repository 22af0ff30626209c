# SPDX-License-Identifier: Apache-2.0
"""Bill of materials of a wheel, from its metadata: CycloneDX JSON, the same for the same wheel."""

from __future__ import annotations

import email
import hashlib
import pathlib
import uuid
import zipfile
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROPERTY = "sglang-bcg-fixes:requirement"


def made(wheel: pathlib.Path) -> dict[str, Any]:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_string(packed.read(name).decode())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    itself = f"pkg:pypi/{canonicalize_name(metadata['Name'])}@{metadata['Version']}"
    needed = [component(Requirement(text)) for text in sorted(metadata.get_all("Requires-Dist", []))]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{itself}#{digest}')}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": itself,
                "name": metadata["Name"],
                "version": metadata["Version"],
                "description": metadata["Summary"],
                "hashes": [{"alg": "SHA-256", "content": digest}],
                "licenses": [{"expression": metadata["License-Expression"]}],
                "purl": itself,
            }
        },
        "components": needed,
        "dependencies": [
            {"ref": itself, "dependsOn": [each["bom-ref"] for each in needed]},
            *({"ref": each["bom-ref"]} for each in needed),
        ],
    }


def component(requirement: Requirement) -> dict[str, Any]:
    """Describe a dependency; it has no version, because pip chooses that when it installs."""
    package = f"pkg:pypi/{canonicalize_name(requirement.name)}"
    return {
        "type": "library",
        "bom-ref": package,
        "name": requirement.name,
        "scope": "optional" if requirement.marker and "extra" in str(requirement.marker) else "required",
        "purl": package,
        "properties": [{"name": PROPERTY, "value": str(requirement)}],
    }
