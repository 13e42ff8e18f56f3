//! A storage that is compatible with S3, over a folder: `s3-server ADDRESS FOLDER ACCESS-KEY SECRET-KEY`. Each folder in
//! FOLDER is a bucket. It checks signatures. For tests only.

mod files;

use std::{net::SocketAddr, path::PathBuf};

use http_body_util::BodyExt as _;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{
        ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
        ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, HeaderValue,
    },
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use s3s::{
    Body, HttpError,
    auth::SimpleAuth,
    service::{S3Service, S3ServiceBuilder},
};
use tokio::net::TcpListener;

type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || {
        arguments
            .next()
            .ok_or("ADDRESS FOLDER ACCESS-KEY SECRET-KEY")
    };
    let (address, folder) = (next()?.parse::<SocketAddr>()?, PathBuf::from(next()?));
    let (access, secret) = (next()?, next()?);
    let mut builder = S3ServiceBuilder::new(files::Files::new(folder)?);
    builder.set_auth(SimpleAuth::from_single(access, secret));
    let service = builder.build();
    let listener = TcpListener::bind(address).await?;
    println!("ready");
    loop {
        let (socket, _) = listener.accept().await?;
        let service = service.clone();
        #[expect(clippy::disallowed_methods, reason = "a connection ends with the test")]
        tokio::spawn(async move {
            let answers = service_fn(move |request| answer(service.clone(), request));
            let served = http1::Builder::new().serve_connection(TokioIo::new(socket), answers);
            let _ = served.await;
        });
    }
}

/// Answers a request. Pages of every origin may make it, as if the bucket had a rule for that.
async fn answer(
    service: S3Service,
    request: Request<Incoming>,
) -> Result<Response<Body>, HttpError> {
    let is_asking = request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = if is_asking {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        response
    } else {
        // All of it is read, also if the request is refused: so a client can use the connection again.
        let (head, body) = request.into_parts();
        let body = body
            .collect()
            .await
            .map_err(|error| HttpError::new(error.into()))?;
        let request = Request::from_parts(head, Body::from(body.to_bytes()));
        // A request is carried out also if its client has gone: `s3s-fs` would lose the parts in the middle of a join.
        #[expect(clippy::disallowed_methods, reason = "it ends with the test")]
        let answered = tokio::spawn(async move { service.call(request).await });
        answered
            .await
            .map_err(|error| HttpError::new(error.into()))??
    };
    for (name, value) in [
        (ACCESS_CONTROL_ALLOW_ORIGIN, "*"),
        (ACCESS_CONTROL_ALLOW_METHODS, "GET, PUT, HEAD"),
        (ACCESS_CONTROL_ALLOW_HEADERS, "*"),
        (ACCESS_CONTROL_EXPOSE_HEADERS, "ETag, Content-Range"),
    ] {
        let value = HeaderValue::from_static(value);
        response.headers_mut().insert(name, value);
    }
    Ok(response)
}
