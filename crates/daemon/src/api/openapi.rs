//! The description of the API, made from the descriptions of the routes and the types on the wire.

use crate::types::ErrorBody;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;
use utoipa::openapi::RefOr;

/// One route, as the document describes it.
pub(super) struct Description {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) summary: &'static str,
    pub(super) query: &'static [(&'static str, &'static str)],
    pub(super) request: Option<Schema>,
    pub(super) response: Content,
    pub(super) status: u16,
}

/// A type on the wire: its name, and it with all that it is made of.
pub(super) enum Schema {
    Any,
    Named { name: String, parts: Vec<(String, RefOr<utoipa::openapi::Schema>)> },
}

pub(super) fn schema<T: ToSchema>() -> Schema {
    let mut parts = vec![(T::name().into_owned(), T::schema())];
    T::schemas(&mut parts);
    Schema::Named { name: T::name().into_owned(), parts }
}

/// What a route answers with.
pub(super) enum Content {
    Json(Schema),
    AnyJson,
    Text,
    Bytes,
    Events,
}

pub(super) fn json<T: ToSchema>() -> Content {
    Content::Json(schema::<T>())
}

/// The OpenAPI document of these routes.
pub(super) fn document(routes: impl IntoIterator<Item = Description>) -> Value {
    let mut schemas = Map::new();
    let mut paths: Map<String, Value> = Map::new();
    let error = reference(&schema::<ErrorBody>(), &mut schemas);
    for route in routes {
        let mut parameters = Vec::new();
        if route.path.contains("{job}") {
            parameters.push(json!({"name": "job", "in": "path", "required": true, "description": "id or name", "schema": {"type": "string"}}));
        }
        for (name, about) in route.query {
            parameters
                .push(json!({"name": name, "in": "query", "required": false, "description": about, "schema": {}}));
        }
        let (kind, content) = match &route.response {
            Content::Json(schema) => ("application/json", reference(schema, &mut schemas)),
            Content::AnyJson => ("application/json", json!({})),
            Content::Text => ("text/plain", json!({"type": "string"})),
            Content::Bytes => ("application/octet-stream", json!({"type": "string", "format": "binary"})),
            Content::Events => ("text/event-stream", json!({"type": "string"})),
        };
        let mut operation = json!({
            "summary": route.summary,
            "parameters": parameters,
            "responses": {
                route.status.to_string(): {"description": "Done", "content": {kind: {"schema": content}}},
                "default": {"description": "Refused", "content": {"application/json": {"schema": error}}},
            },
        });
        if let Some(request) = &route.request {
            let body = reference(request, &mut schemas);
            operation["requestBody"] = json!({"content": {"application/json": {"schema": body}}});
        }
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Gainshare",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "The daemon of one machine. On its Unix socket no token is needed; on loopback send it as a bearer token.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    })
}

/// Adds a type and its parts to the components; answers with a reference to it.
fn reference(schema: &Schema, schemas: &mut Map<String, Value>) -> Value {
    match schema {
        Schema::Any => json!({}),
        Schema::Named { name, parts } => {
            for (name, part) in parts {
                schemas.insert(name.clone(), serde_json::to_value(part).unwrap_or_default());
            }
            json!({"$ref": format!("#/components/schemas/{name}")})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
                map.values().for_each(|v| references(v, found));
            }
            Value::Array(list) => list.iter().for_each(|v| references(v, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let document = crate::api::openapi();
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 20);
        for reference in found {
            let name = reference.strip_prefix("#/components/schemas/").unwrap();
            assert!(document["components"]["schemas"][name].is_object(), "{name} is missing");
        }
    }
}
