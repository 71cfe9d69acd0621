//! The protocol of RAS clients: lines over TCP.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use super::report::RasReport;
use crate::error::{Error, Result};
use nccl_base::time::deadline_after;

/// Maximum size of an answer: about 100,000 ranks.
const LARGEST: usize = 64 << 20;

/// Maximum length of a line before an answer.
const LONGEST_LINE: usize = 4096;

/// A connection to the RAS thread of one process.
///
/// ```no_run
/// use std::time::Duration;
/// use nccl::ras::{RasAnswer, RasClient};
///
/// let client = RasClient::connect("localhost:28028", Duration::from_secs(10))?;
/// if let RasAnswer::Report(report) = client.status()? {
///     for rank in report.lagging() {
///         println!("rank {} has launched {} of {} {}", rank.rank, rank.launched, rank.most, rank.function);
///     }
/// }
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Debug)]
pub struct RasClient {
    stream: BufReader<TcpStream>,
    address: String,
    deadline: Instant,
}

/// The answer of a RAS thread.
#[derive(Clone, Debug, PartialEq)]
pub enum RasAnswer {
    /// From NCCL 2.28.7.
    Report(RasReport),
    /// A text for human readers, from older releases.
    Text(String),
}

/// Lines of text about the processes of a job, as their events happen (NCCL 2.29 and newer).
#[derive(Debug)]
pub struct RasEvents {
    stream: BufReader<TcpStream>,
}

impl RasClient {
    /// Connects to the RAS thread at `address` (`HOST:PORT`, port 28028 unless `NCCL_RAS_ADDR` says otherwise). All
    /// calls of the client end within `timeout` from now, except the name lookup and [`monitor`](Self::monitor).
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::error::ErrorKind::Io) with the address: no process listens there, it does not answer,
    /// or what answers is not a RAS thread of NCCL.
    ///
    /// ```
    /// use std::time::Duration;
    /// use nccl::ras::RasClient;
    ///
    /// let error = RasClient::connect("localhost:1", Duration::from_secs(1)).unwrap_err();
    /// assert!(error.to_string().contains("localhost:1"));
    /// ```
    pub fn connect(address: &str, timeout: Duration) -> Result<Self> {
        let deadline = deadline_after(timeout);
        let stream = dial(address, deadline).map_err(|error| failed(address, error))?;
        let mut client = Self {
            stream: BufReader::new(stream),
            address: address.to_owned(),
            deadline,
        };
        let answer = client.ask("CLIENT PROTOCOL 2")?;
        match answer.strip_prefix("SERVER PROTOCOL ") {
            Some(_) => Ok(client),
            None => Err(client.failed(invalid(format!(
                "this is no RAS service of NCCL: {answer:?}"
            )))),
        }
    }

    /// Requests the state of all communicators of the job.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::error::ErrorKind::Io) when the answer does not come in time, or cannot be read.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use nccl::ras::RasClient;
    /// let answer = RasClient::connect("localhost:28028", Duration::from_secs(10))?.status()?;
    /// println!("{answer:?}");
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn status(mut self) -> Result<RasAnswer> {
        let takes_json = self.ask("SET FORMAT json")? == "OK";
        let text = self.collect("VERBOSE STATUS")?;
        if !takes_json {
            return Ok(RasAnswer::Text(text));
        }
        let report = RasReport::from_json(&text);
        report
            .map(RasAnswer::Report)
            .map_err(|error| self.failed(invalid(format!("its answer cannot be read: {error}"))))
    }

    /// Requests the same as a text for human readers; `verbose` adds one line per rank.
    ///
    /// # Errors
    /// As [`status`](Self::status).
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use nccl::ras::RasClient;
    /// println!("{}", RasClient::connect("localhost:28028", Duration::from_secs(10))?.text(true)?);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn text(mut self, verbose: bool) -> Result<String> {
        self.collect(if verbose { "VERBOSE STATUS" } else { "STATUS" })
    }

    /// Requests events as they happen: of processes that come and go (`lifecycle`), of RAS's own connections (`trace`),
    /// or `all`. Waiting for events has no deadline.
    ///
    /// # Errors
    /// As [`status`](Self::status); and when the library is older than 2.29.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use nccl::ras::RasClient;
    /// let client = RasClient::connect("localhost:28028", Duration::from_secs(10))?;
    /// for line in client.monitor("lifecycle")?.map_while(Result::ok) {
    ///     println!("{line}");
    /// }
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn monitor(mut self, events: &str) -> Result<RasEvents> {
        let answer = self.ask(&format!("MONITOR {events}"))?;
        if answer != "OK" {
            return Err(self.failed(invalid(answer)));
        }
        let unlimited = self.stream.get_ref().set_read_timeout(None);
        unlimited.map_err(|error| self.failed(error))?;
        Ok(RasEvents {
            stream: self.stream,
        })
    }

    /// Sends a command, and returns the one-line answer.
    fn ask(&mut self, command: &str) -> Result<String> {
        let answer = self.send(command).and_then(|()| {
            let line = self.receive_line()?;
            match line.is_empty() {
                true => Err(io::ErrorKind::UnexpectedEof.into()),
                false => Ok(String::from_utf8_lossy(&line).trim_end().to_owned()),
            }
        });
        answer.map_err(|error| self.failed(error))
    }

    /// Receives bytes up to the end of a line. The system's limit is one of each read, and a line may come byte by byte.
    fn receive_line(&mut self) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        while !line.ends_with(b"\n") && line.len() < LONGEST_LINE {
            self.limit()?;
            let held = match self.stream.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                held => held?,
            };
            let end = held.iter().position(|byte| *byte == b'\n');
            let count = end.map_or(held.len(), |end| end + 1);
            if count == 0 {
                break;
            }
            line.extend_from_slice(&held[..count]);
            self.stream.consume(count);
        }
        Ok(line)
    }

    /// Sends a command, and returns everything received until the other end closes the connection.
    fn collect(&mut self, command: &str) -> Result<String> {
        // The RAS thread waits that long for the others, in whole seconds; then it answers without them.
        let left = self.deadline.saturating_duration_since(Instant::now());
        let patience = (left / 2).as_secs().clamp(1, 3600);
        self.ask(&format!("TIMEOUT {patience}"))?;
        let text = self.send(command).and_then(|()| {
            let deadline = self.deadline;
            let bytes = read_all(&mut self.stream, |stream| limit(stream.get_ref(), deadline))?;
            // NCCL treats host names as bytes.
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        });
        text.map_err(|error| self.failed(error))
    }

    fn send(&mut self, command: &str) -> io::Result<()> {
        let left = remaining(self.deadline)?;
        let mut stream = self.stream.get_ref();
        stream.set_write_timeout(Some(left))?;
        stream.write_all(format!("{command}\n").as_bytes())
    }

    /// Makes the next read end at the deadline.
    fn limit(&self) -> io::Result<()> {
        limit(self.stream.get_ref(), self.deadline)
    }

    fn failed(&self, error: io::Error) -> Error {
        failed(&self.address, error)
    }
}

impl Iterator for RasEvents {
    type Item = io::Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut line = Vec::new();
        let longest = LONGEST_LINE as u64;
        let read = (&mut self.stream)
            .take(longest)
            .read_until(b'\n', &mut line);
        match read {
            Ok(0) => None,
            // NCCL treats host names as bytes.
            Ok(_) => Some(Ok(String::from_utf8_lossy(&line).trim_end().to_owned())),
            Err(error) => Some(Err(error)),
        }
    }
}

/// Receives everything until the other end closes the connection, and calls `limit` before each read.
fn read_all<S: io::Read>(
    stream: &mut S,
    limit: impl Fn(&S) -> io::Result<()>,
) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        limit(stream)?;
        let count = match stream.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        if count == 0 {
            return Ok(bytes);
        }
        bytes.extend_from_slice(&piece[..count]);
        if bytes.len() > LARGEST {
            return Err(invalid("its answer does not end".to_owned()));
        }
    }
}

/// Makes the next read end at the deadline.
fn limit(stream: &TcpStream, deadline: Instant) -> io::Result<()> {
    stream.set_read_timeout(Some(remaining(deadline)?))
}

fn dial(address: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for place in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&place, remaining(deadline)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => Ok(left),
    }
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn failed(address: &str, error: io::Error) -> Error {
    let error = match error.kind() {
        // The system's name for a read that has timed out.
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    };
    Error::io(format!("asking the RAS service of NCCL at {address}"))(error)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::TcpListener;
    use std::thread;

    use super::super::report::tests::ANSWER;
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    /// A service that answers each line by `answer`, and closes after an answer that is not a line.
    fn serve(answer: impl Fn(&str) -> String + Send + 'static) -> String {
        serve_bytes(move |line| answer(line).into_bytes())
    }

    fn serve_bytes(answer: impl Fn(&str) -> Vec<u8> + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let reader = BufReader::new(stream.try_clone().unwrap());
            for line in reader.lines() {
                let bytes = answer(&line.unwrap());
                stream.write_all(&bytes).unwrap();
                if !bytes.ends_with(b"\n") {
                    return;
                }
            }
        });
        address
    }

    fn new_release(line: &str) -> String {
        match line {
            "CLIENT PROTOCOL 2" => "SERVER PROTOCOL 2\n".into(),
            "SET FORMAT json" => "OK\n".into(),
            "VERBOSE STATUS" => ANSWER.trim_end().into(),
            timeout if timeout.starts_with("TIMEOUT ") => "OK\n".into(),
            other => format!("ERROR: Unknown command {other}\n"),
        }
    }

    #[test]
    fn a_release_with_json_answers_a_report_and_an_older_one_its_text() {
        let client = RasClient::connect(&serve(new_release), SOON).unwrap();
        let RasAnswer::Report(report) = client.status().unwrap() else {
            panic!("it is JSON");
        };
        assert_eq!(report.lagging()[0].rank, 1);

        let old = |line: &str| match line {
            "SET FORMAT json" => format!("ERROR: Unknown command {line}\n"),
            "VERBOSE STATUS" => "Job summary".into(),
            _ => new_release(line),
        };
        let client = RasClient::connect(&serve(old), SOON).unwrap();
        let answer = client.status().unwrap();
        assert_eq!(answer, RasAnswer::Text("Job summary".into()));
    }

    #[test]
    fn what_is_no_ras_service_and_what_does_not_answer_is_an_error_with_the_address() {
        let address = serve(|_| "HTTP/1.1 400 Bad Request\n".into());
        let error = RasClient::connect(&address, SOON).unwrap_err().to_string();
        assert!(error.contains(&address), "{error}");
        assert!(error.contains("no RAS service"), "{error}");

        // No timeout is a timeout as well.
        let client = RasClient::connect(&serve(new_release), Duration::MAX).unwrap();
        assert!(client.status().is_ok());

        // Listens, and never accepts.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let error = RasClient::connect(&address, Duration::from_millis(50));
        assert!(error.unwrap_err().to_string().contains("timed out"));

        // Speaks for ever, one byte at a time.
        let slow = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = slow.local_addr().unwrap().to_string();
        thread::spawn(move || {
            let mut stream = slow.accept().unwrap().0;
            while stream.write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let begun = Instant::now();
        let error = RasClient::connect(&address, Duration::from_millis(200)).unwrap_err();
        assert!(error.to_string().contains("timed out"), "{error}");
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());

        let address = serve(|line| match line {
            "VERBOSE STATUS" => "{ broken".into(),
            _ => new_release(line),
        });
        let client = RasClient::connect(&address, SOON).unwrap();
        let error = client.status().unwrap_err().to_string();
        assert!(error.contains("cannot be read"), "{error}");
    }

    #[test]
    fn events_come_line_by_line_until_the_service_ends() {
        let address = serve(|line| match line {
            "MONITOR lifecycle" => "OK\nPEER_NEW 10.0.0.5\nPEER_DEAD 10.0.0.6".into(),
            _ => new_release(line),
        });
        let client = RasClient::connect(&address, SOON).unwrap();
        let events = client.monitor("lifecycle").unwrap();
        let lines: Vec<_> = events.map(Result::unwrap).collect();
        assert_eq!(lines, ["PEER_NEW 10.0.0.5", "PEER_DEAD 10.0.0.6"]);

        let client = RasClient::connect(&serve(new_release), SOON).unwrap();
        let error = client.monitor("all").unwrap_err().to_string();
        assert!(error.contains("Unknown command"), "{error}");
    }

    #[test]
    fn an_event_that_is_not_in_utf_8_is_not_lost() {
        let address = serve_bytes(|line| match line {
            "MONITOR lifecycle" => b"OK\nPEER_NEW node-\xff\nPEER_DEAD 10.0.0.6".to_vec(),
            _ => new_release(line).into_bytes(),
        });
        let client = RasClient::connect(&address, SOON).unwrap();
        let events = client.monitor("lifecycle").unwrap();
        let lines: Vec<_> = events.map(Result::unwrap).collect();
        assert_eq!(lines, ["PEER_NEW node-\u{fffd}", "PEER_DEAD 10.0.0.6"]);
    }

    /// An answer, of which every second read is interrupted by a signal.
    struct Signalled(&'static [u8], bool);

    impl io::Read for Signalled {
        fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
            self.1 = !self.1;
            match self.1 {
                true => Err(io::ErrorKind::Interrupted.into()),
                false => self.0.read(piece),
            }
        }
    }

    #[test]
    fn a_signal_during_an_answer_ends_neither_the_answer_nor_the_deadline() {
        let answer = read_all(&mut Signalled(ANSWER.as_bytes(), false), |_| Ok(()));
        assert_eq!(answer.unwrap(), ANSWER.as_bytes());

        let reads = Cell::new(0);
        let limit = |_: &Signalled| {
            reads.set(reads.get() + 1);
            match reads.get() {
                1 => Ok(()),
                _ => Err(io::ErrorKind::TimedOut.into()),
            }
        };
        let error = read_all(&mut Signalled(ANSWER.as_bytes(), false), limit).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
