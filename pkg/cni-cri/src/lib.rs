//! A client of the Kubernetes Container Runtime Interface (CRI) with one request: which pods a
//! runtime has.
//!
//! CRI is gRPC over a Unix socket: HTTP/2 with a message of protocol buffers in each direction.
//! `h2` does HTTP/2. The request is empty and only one field of the answer is needed, so the
//! messages need no generated code.
//!
//! An answer is either complete or an error: a caller removes the attachments of pods that are
//! missing in it.

#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod message;

use std::io;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use cni::machine::Machine;
use cni::{Code, Error};
use http::{HeaderMap, Request};
use tokio::net::UnixStream;

/// The longest answer, in bytes: the limit of the runtimes themselves. A pod takes about 500.
const MAX_ANSWER: usize = 16 << 20;

/// How long the request may take.
pub const TIME_LIMIT: Duration = Duration::from_secs(30);

/// How often a wait looks for a signal.
const TICK: Duration = Duration::from_millis(100);

/// The method, which containerd has since release 1.6 and CRI-O since 1.20.
const METHOD: &str = "http://localhost/runtime.v1.RuntimeService/ListPodSandbox";

/// Returns the IDs of all pods that the runtime at this socket has, whatever state they are in.
///
/// # Errors
/// - Code 5 if no process listens at the socket, the runtime refuses the request, does not answer
///   within `limit`, or closes the connection, or a signal to end arrives.
/// - Code 6 if the answer is not that of a runtime, is incomplete, or is longer than 16 MiB.
pub fn list_pods(socket: &Path, machine: &dyn Machine, limit: Duration) -> Result<Vec<String>, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(|error| Error::caused(Code::IO, "failed to prepare the connection", error))?;
    let answer = runtime.block_on(async {
        let mut ticks = tokio::time::interval(TICK);
        let exchange = tokio::time::timeout(limit, exchange(socket));
        tokio::pin!(exchange);
        loop {
            tokio::select! {
                answer = &mut exchange => return answer.unwrap_or_else(|_| {
                    Err(Error::new(Code::IO, format!("no answer within {} s", limit.as_secs_f32())))
                }),
                _ = ticks.tick() => if machine.terminated() {
                    return Err(Error::new(Code::IO, "interrupted by a signal"));
                },
            }
        }
    })?;
    message::parse_pods(message::unframe(&answer)?)
}

/// Sends the request and returns the body of the answer.
async fn exchange(socket: &Path) -> Result<Vec<u8>, Error> {
    let connect_error = |error: io::Error| Error::caused(Code::IO, "failed to connect", error);
    let stream = UnixStream::connect(socket).await.map_err(connect_error)?;
    let mut builder = h2::client::Builder::new();
    builder.enable_push(false).max_header_list_size(16 << 10).initial_window_size(1 << 20);
    let (client, connection) = builder.handshake::<_, Bytes>(stream).await.map_err(failed)?;
    // Its errors are also those of the request. The task ends with the runtime.
    tokio::spawn(connection);
    let mut client = client.ready().await.map_err(failed)?;
    let request = Request::post(METHOD).header("content-type", "application/grpc").header("te", "trailers");
    let request =
        request.body(()).map_err(|error| Error::caused(Code::INTERNAL, "failed to build the request", error))?;
    let (response, mut body) = client.send_request(request, false).map_err(failed)?;
    body.send_data(Bytes::from_static(&message::EMPTY), true).map_err(failed)?;
    read(response.await.map_err(failed)?).await
}

/// Reads an answer to its end.
async fn read(response: http::Response<h2::RecvStream>) -> Result<Vec<u8>, Error> {
    let (head, mut body) = response.into_parts();
    let kind = head.headers.get("content-type").map(http::HeaderValue::as_bytes).unwrap_or_default();
    if head.status != 200 || !kind.starts_with(b"application/grpc") {
        return Err(Error::new(Code::DECODE, format!("the answer is HTTP {} and not gRPC", head.status)));
    }
    let mut answer = Vec::new();
    while let Some(data) = body.data().await {
        let data = data.map_err(failed)?;
        answer.extend_from_slice(&data);
        if answer.len() > MAX_ANSWER {
            return Err(Error::new(Code::DECODE, "the answer is longer than 16 MiB"));
        }
        body.flow_control().release_capacity(data.len()).map_err(failed)?;
    }
    // An answer without a message has the status in its head.
    let trailers = body.trailers().await.map_err(failed)?.unwrap_or(head.headers);
    check_status(&trailers)?;
    Ok(answer)
}

/// Checks gRPC's status, which is the last part of an answer.
///
/// # Errors
/// Code 6 if it is missing, 5 if it is an error.
fn check_status(trailers: &HeaderMap) -> Result<(), Error> {
    let text = |name: &str| trailers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
    match text("grpc-status") {
        Some(status) if status == "0" => Ok(()),
        Some(status) => {
            let reason = text("grpc-message").unwrap_or_default();
            Err(Error::new(Code::IO, format!("it refused ListPodSandbox: gRPC status {status}: {reason}")))
        }
        None => Err(Error::new(Code::DECODE, "the answer is incomplete: it has no gRPC status")),
    }
}

/// Returns the error for a connection that failed.
fn failed(error: h2::Error) -> Error {
    Error::caused(Code::IO, "the connection failed", error)
}

#[cfg(test)]
mod tests;
