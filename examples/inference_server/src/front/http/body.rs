//! The body of a request: read within a time, and up to a length.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use futures_core::Stream;

use super::refusal::Refusal;

/// The longest accepted body, in bytes: far above any prompt that fits.
const LONGEST: usize = 2 << 20;
/// A longer body is read and discarded up to this length: many clients read no answer before they have sent all.
const THROWN_AWAY: usize = 32 << 20;

/// Why there is no body.
pub(super) enum NoBody {
    /// The client sent an invalid request.
    Refused(Refusal),
    /// The client has disconnected.
    Gone,
}

/// Reads a whole body within `limit`.
pub(super) async fn read(body: Body, limit: Duration) -> Result<Vec<u8>, NoBody> {
    let reading = tokio::time::timeout(limit, read_all(body));
    reading.await.unwrap_or_else(|_| {
        let seconds = limit.as_secs_f64();
        let text = format!("the request did not come within {seconds} s: --client-timeout says how long it may take");
        let refusal = Refusal::new(StatusCode::REQUEST_TIMEOUT, text);
        Err(NoBody::Refused(refusal))
    })
}

async fn read_all(body: Body) -> Result<Vec<u8>, NoBody> {
    let mut parts = body.into_data_stream();
    let (mut all, mut length) = (Vec::new(), 0);
    while let Some(part) = std::future::poll_fn(|task| Pin::new(&mut parts).poll_next(task)).await {
        let part = part.map_err(|error| no_part(&error))?;
        length += part.len();
        if length <= LONGEST {
            all.extend_from_slice(&part);
        } else if length <= THROWN_AWAY {
            all = Vec::new();
        } else {
            break;
        }
    }
    if length > LONGEST {
        let text = format!("the request is longer than {LONGEST} bytes");
        let refusal = Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, text);
        return Err(NoBody::Refused(refusal));
    }
    Ok(all)
}

/// Maps a failed read: an invalid body gets an answer, a disconnected client does not.
fn no_part(error: &axum::Error) -> NoBody {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        let broken = error.downcast_ref::<io::Error>();
        match broken.map(|broken| (broken, broken.kind())) {
            Some((broken, io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData)) => {
                let text = format!("the body of the request cannot be read: {broken}");
                return NoBody::Refused(Refusal::new(StatusCode::BAD_REQUEST, text));
            }
            _ => cause = error.source(),
        }
    }
    NoBody::Gone
}
