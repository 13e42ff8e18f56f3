//! The OpenAPI document of the HTTP interface, generated from the routes.

use std::{mem::take, sync::LazyLock};

use axum::{http::header, response::IntoResponse};
use bytes::Bytes;
use utoipa::{
    Modify, OpenApi, PartialSchema,
    openapi::{
        Components, Content, HttpMethod, PathItem, Ref, RefOr, Required, ResponseBuilder,
        ResponsesBuilder, Schema, Type,
        path::{Operation, Parameter, ParameterIn},
        request_body::RequestBodyBuilder,
        schema::SchemaType,
        security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme},
    },
};

use super::{consumers, development, files, http};
use crate::protocol::{Method, Request, Route};

#[derive(OpenApi)]
#[openapi(
    info(title = "chat-gateway", description = "The requests of docs/protocol.md for back ends. \
        The header `chat-user` (percent-encoded) names the user for whom the back end acts; without it, it acts for the \
        token's own user. The token has `role` = `service`, and its `scope` names what each operation lists under \
        `security`."),
    paths(
        development::token, http::presence, http::disconnect, http::deletion::delete_one, http::deletion::delete,
        http::devices::list, http::devices::set, http::devices::remove,
        consumers::list, consumers::test, consumers::enable, consumers::disable, consumers::replay, consumers::skipped,
        files::upload::begin, files::upload::options, files::upload::offset, files::append::append,
        files::upload::give_up, files::parts::list, files::parts::complete, files::download::redirect, files::download::file,
    ),
    modifiers(&Requests, &Bearer, &Descriptions),
)]
struct Document;

/// Adds the requests of the table of requests.
struct Requests;

impl Modify for Requests {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_with(Components::new);
        for route in Request::routes() {
            let described = Operations::of(&route);
            components.schemas.extend(described.schemas);
            let method = match route.method {
                Method::Get => HttpMethod::Get,
                Method::Put => HttpMethod::Put,
                Method::Post => HttpMethod::Post,
                Method::Patch => HttpMethod::Patch,
                Method::Delete => HttpMethod::Delete,
            };
            let item = PathItem::new(method, described.operation);
            let paths = &mut document.paths.paths;
            match paths.get_mut(route.path) {
                Some(known) => known.merge_operations(item),
                None => drop(paths.insert(route.path.into(), item)),
            }
        }
    }
}

/// An operation, and the types that it names.
struct Operations {
    operation: Operation,
    schemas: Vec<(String, RefOr<Schema>)>,
}

impl Operations {
    fn of(route: &Route) -> Self {
        let (fields, answer) = ((route.fields)(), (route.answer)());
        let mut schemas = [fields.others, answer.others].concat();
        let RefOr::T(Schema::Object(mut object)) = fields.schema else {
            unreachable!("the fields of a request are an object");
        };
        let mut operation = Operation::new();
        operation.summary = Some(route.description.trim().to_owned());
        let mut parameters = Vec::new();
        for name in named_in(route.path) {
            object.required.retain(|required| required != name);
            let schema = object.properties.remove(name);
            parameters.push(parameter(name, ParameterIn::Path, true, schema));
        }
        if let Some(body) = route.body {
            schemas.push((body.to_owned(), Schema::Object(object).into()));
            let content = Content::new(Some(Ref::from_schema_name(body)));
            let body = RequestBodyBuilder::new().content("application/json", content);
            operation.request_body = Some(body.required(Some(Required::True)).build().into());
        } else if route.method == Method::Get {
            for (name, schema) in object.properties {
                let required = object.required.contains(&name);
                parameters.push(parameter(&name, ParameterIn::Query, required, Some(schema)));
            }
        }
        let parameters: Vec<_> = parameters.into_iter().map(RefOr::T).collect();
        operation.parameters = (!parameters.is_empty()).then_some(parameters);
        let response = |name: &str| {
            let content = Content::new(Some(Ref::from_schema_name(name)));
            ResponseBuilder::new()
                .content("application/json", content)
                .build()
        };
        let mut responses = ResponsesBuilder::new().response("200", response(&answer.name));
        if route.path == "/v1/conversations" {
            responses = responses.response("201", response(&answer.name));
        }
        operation.responses = responses.response("default", response("Refusal")).build();
        let scope = SecurityRequirement::new("service", [route.scope]);
        operation.security = Some(vec![scope]);
        schemas.push((answer.name, answer.schema));
        Self { operation, schemas }
    }
}

/// Returns the names of the fields in a path.
fn named_in(path: &str) -> impl Iterator<Item = &str> {
    path.split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
}

fn parameter(
    name: &str,
    place: ParameterIn,
    required: bool,
    schema: Option<RefOr<Schema>>,
) -> Parameter {
    let mut parameter = Parameter::new(name);
    parameter.parameter_in = place;
    parameter.required = if required {
        Required::True
    } else {
        Required::False
    };
    // A parameter is there, or it is not.
    parameter.schema = match schema {
        Some(RefOr::T(Schema::OneOf(either))) => either.items.into_iter().next(),
        // The only number in a path.
        _ if name == "seq" => Some(u64::schema()),
        schema => schema,
    };
    if let Some(RefOr::Ref(named)) = &mut parameter.schema {
        parameter.description = Some(take(&mut named.description)).filter(|text| !text.is_empty());
    }
    if let Some(RefOr::T(Schema::Object(object))) = &mut parameter.schema {
        parameter.description = object.description.take();
        if let SchemaType::Array(types) = &mut object.schema_type {
            types.retain(|of| *of != Type::Null);
            if let [of] = &types[..] {
                object.schema_type = SchemaType::Type(of.clone());
            }
        }
    }
    parameter
}

struct Bearer;

impl Modify for Bearer {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .bearer_format("JWT")
            .build();
        let components = document.components.get_or_insert_with(Components::new);
        for name in ["service", "user"] {
            components.add_security_scheme(name, SecurityScheme::Http(scheme.clone()));
        }
    }
}

/// Describes each response, which the specification requires, and makes the ids of operations unique: the names of generated
/// functions. Tags are groups of the interface, not modules of this program.
struct Descriptions;

impl Modify for Descriptions {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        for (path, item) in &mut document.paths.paths {
            let operations = [
                ("get", &mut item.get),
                ("put", &mut item.put),
                ("post", &mut item.post),
                ("delete", &mut item.delete),
                ("options", &mut item.options),
                ("head", &mut item.head),
                ("patch", &mut item.patch),
            ];
            for (method, operation) in operations {
                let Some(operation) = operation else {
                    continue;
                };
                operation.operation_id = Some(operation_id(method, path));
                operation.tags = Some(vec![tag(path)]);
                for (status, response) in &mut operation.responses.responses {
                    if let RefOr::T(response) = response {
                        description(status).clone_into(&mut response.description);
                    }
                }
            }
        }
    }
}

/// Returns the name of the group of an operation, such as `conversations`.
fn tag(path: &str) -> String {
    let first = path.split('/').find(|part| !matches!(*part, "" | "v1"));
    first.unwrap_or_default().to_owned()
}

/// Returns the name of an operation, such as `post_conversations_conversation_messages`.
fn operation_id(method: &str, path: &str) -> String {
    let parts = path
        .split('/')
        .filter(|part| !part.is_empty() && *part != "v1");
    let parts = parts.map(|part| part.trim_matches(['{', '}']));
    let mut id = method.to_owned();
    for part in parts {
        id.push('_');
        id.push_str(part);
    }
    id
}

fn description(status: &str) -> &'static str {
    match status {
        "200" => "Done",
        "201" => "Created",
        "202" => "Accepted, and done later",
        "204" => "Done, without content",
        "206" => "A part of the file",
        "302" => "The address of the file",
        "404" => "There is no such thing",
        _ => "Refused: the code and the reason",
    }
}

pub(super) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}

/// Serves the document. It is generated once, because any client may request it often.
pub(super) async fn served() -> impl IntoResponse {
    static TEXT: LazyLock<Bytes> =
        LazyLock::new(|| document().to_json().unwrap_or_default().into());
    ([(header::CONTENT_TYPE, "application/json")], TEXT.clone())
}

#[cfg(test)]
mod tests {
    /// Clients are generated from the document.
    #[test]
    fn the_document_is_the_golden_one() {
        let text = super::document().to_pretty_json().unwrap() + "\n";
        crate::golden::check("openapi.json", &text);
    }
}
