//! The daemon's end of a connection to a plugin.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use cni_dhcp::rpc::{CONNECTED, Connection, Method, Request, write_response};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::Daemon;

/// How long a client may take to send a call, and to receive an answer. Without this limit, idle
/// connections could use up the daemon's descriptors.
const CLIENT_LIMIT: Duration = Duration::from_secs(20);

/// A connection to a plugin.
struct Client {
    stream: UnixStream,
    decoder: Connection,
    /// Whether the client's first line has been answered.
    is_greeted: bool,
}

/// Answers the calls of one connection until the client closes it, an I/O error occurs, the
/// client's bytes cannot be decoded, or the client exceeds [`CLIENT_LIMIT`].
pub(super) async fn serve(daemon: Rc<Daemon>, stream: UnixStream) {
    let mut client = Client { stream, decoder: Connection::default(), is_greeted: false };
    while let Ok(Ok(request)) = timeout(CLIENT_LIMIT, client.receive_call()).await {
        let outcome = match request.method {
            Some(Method::Allocate | Method::AllocateIpv6) => {
                daemon.allocate(&request.args, client.closed()).await.map(|result| Some(Rc::new(result)))
            }
            Some(Method::Release) => daemon.release_attachment(&request.args).await.map(|()| None),
            None => Err(format!("rpc: can't find service {}", request.name)),
        };
        let response = match &outcome {
            Ok(result) => write_response(&request, Ok(result.as_deref())),
            Err(text) => write_response(&request, Err(text)),
        };
        let Ok(Ok(())) = timeout(CLIENT_LIMIT, client.stream.write_all(&response)).await else { return };
    }
}

impl Client {
    /// Waits for the next call. Answers the client's first line when it arrives: a client may send
    /// its call without waiting for that answer.
    ///
    /// # Errors
    /// The client has closed the connection, its bytes cannot be decoded, or an I/O error.
    async fn receive_call(&mut self) -> io::Result<Request> {
        loop {
            let received = self.decoder.request();
            if !self.is_greeted && self.decoder.handshake_done() {
                self.is_greeted = true;
                self.stream.write_all(CONNECTED).await?;
            }
            match received.map_err(io::Error::other)? {
                Some(request) => return Ok(request),
                // The call is not complete yet.
                None => self.receive_bytes().await?,
            }
        }
    }

    /// Waits for bytes from the client, and passes them to the decoder.
    ///
    /// # Errors
    /// The client has closed the connection, or an I/O error.
    async fn receive_bytes(&mut self) -> io::Result<()> {
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            length => {
                self.decoder.push(&buffer[..length]);
                Ok(())
            }
        }
    }

    /// Waits until the client closes the connection.
    async fn closed(&mut self) {
        while self.receive_bytes().await.is_ok() {}
    }
}
