# syntax=docker/dockerfile:1
FROM rust:1.95-bookworm AS build
WORKDIR /build
COPY Cargo.toml Cargo.lock ./
COPY fuzz fuzz
COPY loadtest loadtest
COPY src src
COPY client-js/page/dist client-js/page/dist
COPY tests/rust tests/rust
RUN cargo build --release --locked --package chat-gateway --bin chat-gateway \
 && mkdir -p /data

FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /build/target/release/chat-gateway /usr/local/bin/chat-gateway
# The user nonroot, which runs the gateway, must be able to write the store's directory.
COPY --from=build --chown=nonroot:nonroot /data /data
ENV CHAT__CLIENT__LISTEN=0.0.0.0:8080 \
    CHAT__INTERNAL__LISTEN=127.0.0.1:9090 \
    CHAT__STORE__EMBEDDED__PATH=/data \
    CHAT__LOG__FORMAT=json
USER nonroot
VOLUME /data
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=4s --start-period=30s CMD ["chat-gateway", "health"]
ENTRYPOINT ["chat-gateway"]
CMD ["serve"]
