//! The server answers several clients at once, and ends on request.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};

/// A client that asks and waits for the answer, until `quit`.
fn ask(connection: &mut BufReader<TcpStream>, line: &str) -> String {
    let mut answer = String::new();
    connection
        .get_mut()
        .write_all(format!("{line}\n").as_bytes())
        .expect("it listens");
    connection.read_line(&mut answer).expect("it answers");
    answer.trim().to_owned()
}

#[test]
fn clients_are_answered_by_all_ranks_and_the_server_ends() {
    let mut server = Command::new(env!("CARGO_BIN_EXE_async-server"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(server.stdout.take().expect("a pipe")).lines();
    let address = lines.by_ref().map_while(Result::ok).find_map(|line| {
        let (_, address) = line.split_once("listening at ")?;
        Some(address.to_owned())
    });
    let address = address.expect("it says where it listens");
    let connect = || BufReader::new(TcpStream::connect(&address).expect("it listens"));
    let mut clients: Vec<_> = (0..8).map(|_| connect()).collect();
    for round in 0..20 {
        for (number, client) in clients.iter_mut().enumerate() {
            let request = round * 8 + number as i64;
            assert_eq!(ask(client, &request.to_string()), (3 * request).to_string());
        }
    }
    // An open, silent connection of one client does not delay the others.
    ask(&mut clients[0], "quit");
    let ended = server.wait().expect("it was started");
    assert!(ended.success(), "{ended}");
}
