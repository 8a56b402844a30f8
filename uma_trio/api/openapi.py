"""``GET /openapi.json``: every path with the schema of its body, from the declarations that decode it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from uma_trio import __version__
from uma_trio.api.bodies import BodySpec
from uma_trio.http.router import Route

_REF: Final = "#/components/schemas/{name}"
_JSON: Final = "application/json"


def openapi(routes: Sequence[Route]) -> bytes:
    """Return the OpenAPI 3.1 document of these routes."""
    specs = [route.body for route in routes if isinstance(route.body, BodySpec)]
    structs = list(dict.fromkeys(spec.struct for spec in specs))
    _, components = msgspec.json.schema_components(structs, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = f"{route.path}{{name}}" if route.takes_more else route.path
        operation: dict[str, Any] = {
            "summary": (route.handler.__doc__ or "").splitlines()[0],
            "responses": {"200": {"description": "the answer"}, "4XX": {"description": "an error"}},
        }
        if route.takes_more:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        if isinstance(route.body, BodySpec):
            schema = _schema(route.body, components)
            operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
        if route.access == "open":
            operation["security"] = []
        paths.setdefault(path, {})[route.method.lower()] = operation
    document = {
        "openapi": "3.1.0",
        "info": {"title": "uma-trio", "version": __version__},
        "servers": [{"url": "/"}, {"url": "/v1"}],
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _schema(spec: BodySpec[Any], components: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a body: a reference, or a part of the Struct's where it may have only some fields."""
    whole = components[spec.struct.__name__]
    allowed = {field.name for field in spec.fields}
    if allowed == whole["properties"].keys():
        return {"$ref": _REF.format(name=spec.struct.__name__)}
    properties = {name: value for name, value in whole["properties"].items() if name in allowed}
    return {**whole, "properties": properties}
