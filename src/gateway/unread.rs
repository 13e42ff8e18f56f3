//! Notices whether the body of a request was read to its end. If it was not, the connection closes after the answer, and the
//! answer has to say so (RFC 9112, 9.6). Otherwise clients send the next request on a connection that is being closed.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use axum::body::{Body, Bytes};
use hyper::{
    Request,
    body::{Body as HttpBody, Frame, SizeHint},
};

/// A body that notes its end.
struct Noted {
    body: Body,
    is_read: Arc<AtomicBool>,
}

/// Has the end of a request's body noted. `None` if there is no body.
pub(super) fn note(request: Request<Body>) -> (Request<Body>, Option<Arc<AtomicBool>>) {
    if request.body().is_end_stream() {
        return (request, None);
    }
    let is_read = Arc::new(AtomicBool::new(false));
    let noted = is_read.clone();
    let request = request.map(|body| {
        Body::new(Noted {
            body,
            is_read: noted,
        })
    });
    (request, Some(is_read))
}

impl HttpBody for Noted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.is_read.store(true, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
