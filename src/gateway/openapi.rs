//! The OpenAPI document of the HTTP interface, generated from the routes.

use std::sync::LazyLock;

use axum::{http::header, response::IntoResponse};
use bytes::Bytes;
use utoipa::{
    Modify, OpenApi,
    openapi::{
        Components, RefOr,
        security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
    },
};

use super::{consumers, development, files, http};

#[derive(OpenApi)]
#[openapi(
    info(title = "chat-gateway", description = "The requests of docs/protocol.md for back ends. \
        The header `chat-user` (percent-encoded) names the user for whom the back end acts; without it, it acts for the \
        token's own user. The token has `role` = `service`, and its `scope` names what each operation lists under \
        `security`."),
    paths(
        development::token, http::inbox, http::public, http::presence, http::disconnect, http::create,
        http::conversation, http::update, http::history, http::send, http::participants, http::add,
        http::remove, http::set_role, http::join, http::leave, http::read, http::delivered,
        http::changes::edit, http::changes::delete_one, http::changes::delete, http::changes::react,
        http::changes::unreact, http::changes::reactions, http::changes::changes,
        http::devices::list, http::devices::set, http::devices::remove,
        consumers::list, consumers::test, consumers::enable, consumers::disable, consumers::replay, consumers::skipped,
        files::upload::begin, files::upload::options, files::upload::offset, files::append::append,
        files::upload::give_up, files::parts::list, files::parts::complete, files::download::redirect, files::download::file,
    ),
    modifiers(&Bearer, &Descriptions),
)]
struct Document;

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
