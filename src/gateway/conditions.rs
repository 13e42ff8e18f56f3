//! Conditional requests (RFC 9110, section 13), for representations with a strong ETag and no time of modification. Pure
//! functions.

use axum::{
    http::{HeaderMap, HeaderName, StatusCode, header},
    response::Response,
};

use super::reply::refused_with;
use crate::protocol::ErrorCode;

/// Checks the conditions of a GET or HEAD request. Returns the status to answer with instead of the representation: 412 if
/// it is not the one that the client wants, 304 if the client has it already.
pub(super) fn unmet(headers: &HeaderMap, etag: &str) -> Option<StatusCode> {
    if headers.contains_key(header::IF_MATCH) && !names(headers, header::IF_MATCH, etag, false) {
        return Some(StatusCode::PRECONDITION_FAILED);
    }
    names(headers, header::IF_NONE_MATCH, etag, true).then_some(StatusCode::NOT_MODIFIED)
}

/// Refuses a request for another representation.
pub(super) fn failed() -> Response {
    let text = "if-match: the content is another one".to_owned();
    refused_with(StatusCode::PRECONDITION_FAILED, ErrorCode::Conflict, text)
}

/// Returns whether a header names the ETag, or `*`. A weak tag, such as that of a proxy that compressed the response,
/// counts only in a weak comparison.
fn names(headers: &HeaderMap, name: HeaderName, etag: &str, weakly: bool) -> bool {
    let lines = headers.get_all(name).into_iter();
    lines.filter_map(|line| line.to_str().ok()).any(|line| {
        line.trim() == "*" || tags(line).any(|(is_weak, tag)| tag == etag && (weakly || !is_weak))
    })
}

/// Reads a list of ETags. Each has its quotes, and whether it is weak. What is no ETag ends the list.
fn tags(mut rest: &str) -> impl Iterator<Item = (bool, &str)> {
    std::iter::from_fn(move || {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let (is_weak, tag) = rest
            .strip_prefix("W/")
            .map_or((false, rest), |tag| (true, tag));
        let end = tag.strip_prefix('"')?.find('"')? + 2;
        rest = &tag[end..];
        Some((is_weak, &tag[..end]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(name: HeaderName, lines: &[&str]) -> Option<StatusCode> {
        let lines = lines
            .iter()
            .map(|line| (name.clone(), line.parse().unwrap()));
        unmet(&lines.collect(), "\"a,b\"")
    }

    #[test]
    fn conditions_compare_tags() {
        for same in [
            &["\"a,b\""][..],
            &["W/\"a,b\""],
            &["*"],
            &["\"x\", , \"a,b\""],
            &["\"x\",W/\"a,b\" , \"y\""],
            &["\"x\"", "\"a,b\""],
        ] {
            let got = asked(header::IF_NONE_MATCH, same);
            assert_eq!(got, Some(StatusCode::NOT_MODIFIED), "{same:?}");
        }
        for other in [&["\"a\""][..], &["a,b"], &[""], &["\"a,b"], &["w/\"a,b\""]] {
            assert_eq!(asked(header::IF_NONE_MATCH, other), None, "{other:?}");
        }
        for (lines, unmet) in [
            (&["\"a,b\""][..], false),
            (&["*"], false),
            (&["\"x\"", "\"a,b\""], false),
            (&["W/\"a,b\""], true),
            (&["\"x\""], true),
            (&[""], true),
        ] {
            let got = asked(header::IF_MATCH, lines);
            assert_eq!(
                got,
                unmet.then_some(StatusCode::PRECONDITION_FAILED),
                "{lines:?}"
            );
        }
        assert_eq!(unmet(&HeaderMap::new(), "\"a\""), None);
    }
}
