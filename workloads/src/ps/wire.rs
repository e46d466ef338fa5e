//! The messages between workers and servers.
//!
//! A message is a *frame*: four bytes that mark the protocol, one byte for the kind, the length of the body in four
//! bytes, and the body. Numbers are little-endian. The reader knows the largest sensible body of every kind and
//! rejects a longer one before it reserves memory for it. A frame that ends too early, or that does not start with
//! the mark, is an error of its connection.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

const MARK: [u8; 4] = *b"GSP1";
const HEADER_BYTES: usize = 9;
/// A greeting or a refusal is a few hundred bytes of text.
const MAX_TEXT_BYTES: usize = 1 << 14;

#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the bytes are not a message of this protocol")]
    NoMessage,
    #[error("a message of kind {kind} has {bytes} bytes; at most {limit} are possible")]
    TooLong { kind: u8, bytes: usize, limit: usize },
    #[error("the body of a message of kind {kind} cannot be read")]
    Body { kind: u8 },
}

/// The first message of a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) worker: u32,
    /// Which server the worker takes the receiver for, and how many there are.
    pub(crate) server: u32,
    pub(crate) servers: u32,
    pub(crate) settings: BTreeMap<String, String>,
}

/// What a server reports about itself to a worker that joins, or that must find a common step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Survey {
    /// How often the servers have gone back, as far as this server knows. A request of another generation has no
    /// effect.
    pub(crate) generation: u64,
    /// The steps after which the server can restore its state.
    pub(crate) restorable: Vec<u64>,
}

/// What a worker sends. A push and a skip are not answered.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Request {
    Hello(Hello),
    /// Asks for the server's survey.
    Survey,
    /// Asks for the parameters, once the server has taken more than `above` steps.
    Pull {
        generation: u64,
        above: Option<u64>,
    },
    /// The gradient for the step after `step`.
    Push {
        generation: u64,
        step: u64,
        gradient: Vec<f32>,
    },
    /// This worker has no gradient for the step after `step`.
    Skip {
        generation: u64,
        step: u64,
    },
    /// Go back to the state after `step`, as the beginning of this generation.
    Rollback {
        generation: u64,
        step: u64,
    },
}

/// What a server answers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reply {
    /// The worker is live.
    Survey(Survey),
    /// The connection ends, for this reason.
    Refused(String),
    Parameters {
        step: u64,
        finished: bool,
        values: Vec<f32>,
    },
    /// Every live worker skipped the step after `step`.
    AllSkipped {
        step: u64,
    },
    /// The server is at the beginning of the generation that the worker asked for.
    RolledBack,
    /// The server is of another generation than the request: the worker must ask for the surveys.
    Stale,
}

const HELLO: u8 = 1;
const PULL: u8 = 2;
const PUSH: u8 = 3;
const SKIP: u8 = 4;
const ROLLBACK: u8 = 5;
const ASK_SURVEY: u8 = 6;
const SURVEY: u8 = 65;
const REFUSED: u8 = 66;
const PARAMETERS: u8 = 67;
const ALL_SKIPPED: u8 = 68;
const ROLLED_BACK: u8 = 69;
const STALE: u8 = 70;

/// Stands for "no step" in a pull.
const NO_STEP: u64 = u64::MAX;

struct Frame {
    kind: u8,
    body: Vec<u8>,
}

/// Reads one frame; `None`: the connection ended between two frames. `values` is how many parameters a body may hold.
fn read_frame(stream: &mut impl Read, values: usize) -> Result<Option<Frame>, WireError> {
    let mut header = [0; HEADER_BYTES];
    if stream.read(&mut header[..1])? == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut header[1..])?;
    if header[..4] != MARK {
        return Err(WireError::NoMessage);
    }
    let kind = header[4];
    let bytes = u32::from_le_bytes([header[5], header[6], header[7], header[8]]) as usize;
    let limit = match kind {
        HELLO | SURVEY | REFUSED => MAX_TEXT_BYTES,
        ASK_SURVEY | ROLLED_BACK | STALE => 0,
        ALL_SKIPPED => 8,
        PULL | SKIP | ROLLBACK => 16,
        PUSH => 16 + 4 * values,
        PARAMETERS => 9 + 4 * values,
        _ => return Err(WireError::NoMessage),
    };
    if bytes > limit {
        return Err(WireError::TooLong { kind, bytes, limit });
    }
    let mut body = vec![0; bytes];
    stream.read_exact(&mut body)?;
    Ok(Some(Frame { kind, body }))
}

fn write_frame(stream: &mut impl Write, kind: u8, parts: &[&[u8]]) -> io::Result<()> {
    let bytes: usize = parts.iter().map(|part| part.len()).sum();
    let length = u32::try_from(bytes).map_err(|_| io::Error::other("a message of 4 GiB; use more servers"))?;
    let mut frame = Vec::with_capacity(HEADER_BYTES + bytes);
    frame.extend_from_slice(&MARK);
    frame.push(kind);
    frame.extend_from_slice(&length.to_le_bytes());
    parts.iter().for_each(|part| frame.extend_from_slice(part));
    stream.write_all(&frame)
}

impl Frame {
    /// The whole number at this byte.
    fn number(&self, from: usize) -> Result<u64, WireError> {
        let bytes = self.body.get(from..from + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u64::from_le_bytes).ok_or(WireError::Body { kind: self.kind })
    }

    fn values(&self, from: usize) -> Result<Vec<f32>, WireError> {
        let bytes = self.body.get(from..).filter(|bytes| bytes.len().is_multiple_of(4));
        let bytes = bytes.ok_or(WireError::Body { kind: self.kind })?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    fn json<T: for<'a> Deserialize<'a>>(&self) -> Result<T, WireError> {
        serde_json::from_slice(&self.body).map_err(|_| WireError::Body { kind: self.kind })
    }
}

fn value_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The frame of a push, without a copy of the gradient into a [`Request`] first.
pub(crate) fn write_push(stream: &mut impl Write, generation: u64, step: u64, gradient: &[f32]) -> io::Result<()> {
    write_frame(stream, PUSH, &[&generation.to_le_bytes(), &step.to_le_bytes(), &value_bytes(gradient)])
}

/// A frame of a generation and a step.
fn write_step(stream: &mut impl Write, kind: u8, generation: u64, step: u64) -> io::Result<()> {
    write_frame(stream, kind, &[&generation.to_le_bytes(), &step.to_le_bytes()])
}

impl Request {
    pub(crate) fn write(&self, stream: &mut impl Write) -> io::Result<()> {
        match self {
            Request::Hello(hello) => {
                let text = serde_json::to_vec(hello).map_err(io::Error::other)?;
                write_frame(stream, HELLO, &[&text])
            }
            Request::Survey => write_frame(stream, ASK_SURVEY, &[]),
            Request::Pull { generation, above } => write_step(stream, PULL, *generation, above.unwrap_or(NO_STEP)),
            Request::Push { generation, step, gradient } => write_push(stream, *generation, *step, gradient),
            Request::Skip { generation, step } => write_step(stream, SKIP, *generation, *step),
            Request::Rollback { generation, step } => write_step(stream, ROLLBACK, *generation, *step),
        }
    }

    /// The next request; `None`: the connection ended.
    pub(crate) fn read(stream: &mut impl Read, values: usize) -> Result<Option<Request>, WireError> {
        let Some(frame) = read_frame(stream, values)? else { return Ok(None) };
        Ok(Some(match frame.kind {
            HELLO => Request::Hello(frame.json()?),
            ASK_SURVEY => Request::Survey,
            PULL => {
                let above = Some(frame.number(8)?).filter(|step| *step != NO_STEP);
                Request::Pull { generation: frame.number(0)?, above }
            }
            PUSH => Request::Push { generation: frame.number(0)?, step: frame.number(8)?, gradient: frame.values(16)? },
            SKIP => Request::Skip { generation: frame.number(0)?, step: frame.number(8)? },
            ROLLBACK => Request::Rollback { generation: frame.number(0)?, step: frame.number(8)? },
            _ => return Err(WireError::NoMessage),
        }))
    }
}

impl Reply {
    pub(crate) fn write(&self, stream: &mut impl Write) -> io::Result<()> {
        match self {
            Reply::Survey(survey) => {
                let text = serde_json::to_vec(survey).map_err(io::Error::other)?;
                write_frame(stream, SURVEY, &[&text])
            }
            Reply::Refused(why) => write_frame(stream, REFUSED, &[why.as_bytes()]),
            Reply::Parameters { step, finished, values } => {
                write_frame(stream, PARAMETERS, &[&step.to_le_bytes(), &[u8::from(*finished)], &value_bytes(values)])
            }
            Reply::AllSkipped { step } => write_frame(stream, ALL_SKIPPED, &[&step.to_le_bytes()]),
            Reply::RolledBack => write_frame(stream, ROLLED_BACK, &[]),
            Reply::Stale => write_frame(stream, STALE, &[]),
        }
    }

    /// The next reply; `None`: the connection ended.
    pub(crate) fn read(stream: &mut impl Read, values: usize) -> Result<Option<Reply>, WireError> {
        let Some(frame) = read_frame(stream, values)? else { return Ok(None) };
        Ok(Some(match frame.kind {
            SURVEY => Reply::Survey(frame.json()?),
            REFUSED => Reply::Refused(String::from_utf8_lossy(&frame.body).into_owned()),
            PARAMETERS => {
                let finished = *frame.body.get(8).ok_or(WireError::Body { kind: frame.kind })? != 0;
                Reply::Parameters { step: frame.number(0)?, finished, values: frame.values(9)? }
            }
            ALL_SKIPPED => Reply::AllSkipped { step: frame.number(0)? },
            ROLLED_BACK => Reply::RolledBack,
            STALE => Reply::Stale,
            _ => return Err(WireError::NoMessage),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were() {
        let hello = Hello { worker: 3, server: 1, servers: 2, settings: BTreeMap::from([("a".into(), "b".into())]) };
        for request in [
            Request::Hello(hello),
            Request::Survey,
            Request::Pull { generation: 1, above: None },
            Request::Pull { generation: 2, above: Some(0) },
            Request::Push { generation: 3, step: 7, gradient: vec![1.0, f32::MIN_POSITIVE, -0.0] },
            Request::Skip { generation: 4, step: 8 },
            Request::Rollback { generation: 5, step: 9 },
        ] {
            let mut bytes = Vec::new();
            request.write(&mut bytes).unwrap();
            assert_eq!(Request::read(&mut bytes.as_slice(), 3).unwrap(), Some(request));
            for cut in 1..bytes.len() {
                assert!(Request::read(&mut &bytes[..cut], 3).is_err(), "a message that ends after {cut} bytes");
            }
        }
        for reply in [
            Reply::Survey(Survey { generation: 6, restorable: vec![0, 50] }),
            Reply::Refused("because".to_owned()),
            Reply::Parameters { step: 4, finished: true, values: vec![0.5; 3] },
            Reply::AllSkipped { step: 5 },
            Reply::RolledBack,
            Reply::Stale,
        ] {
            let mut bytes = Vec::new();
            reply.write(&mut bytes).unwrap();
            assert_eq!(Reply::read(&mut bytes.as_slice(), 3).unwrap(), Some(reply));
        }
        assert_eq!(Request::read(&mut io::empty(), 3).unwrap(), None);
    }

    #[test]
    fn a_body_that_is_too_long_is_rejected_before_it_is_read() {
        let mut bytes = Vec::new();
        write_push(&mut bytes, 0, 0, &[0.0; 4]).unwrap();
        assert!(matches!(Request::read(&mut bytes.as_slice(), 3), Err(WireError::TooLong { limit: 28, .. })));
        let mut huge = MARK.to_vec();
        huge.extend([HELLO, 255, 255, 255, 255]);
        assert!(matches!(Request::read(&mut huge.as_slice(), 3), Err(WireError::TooLong { .. })));
    }

    #[test]
    fn garbage_is_no_message() {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], &[255; 64], b"GSP1\x63\0\0\0\0", b"GSP1\x41\0\0\0\0"]
        {
            assert!(Request::read(&mut &*garbage, 3).is_err(), "{garbage:?}");
        }
    }
}
