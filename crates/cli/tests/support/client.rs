//! An HTTP client that does what clients do: sends in pieces, streams, stops reading, leaves.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use super::SOON;

/// A request as it goes over the wire.
#[derive(Clone, Debug)]
pub struct Request {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Request {
    pub fn get(path: &str) -> Request {
        Request::new("GET", path, Vec::new())
    }

    pub fn post(path: &str, json: &Value) -> Request {
        Request::raw(path, json.to_string())
    }

    /// A POST whose body is sent byte for byte.
    pub fn raw(path: &str, body: impl Into<Vec<u8>>) -> Request {
        Request::new("POST", path, body.into()).header("content-type", "application/json")
    }

    pub fn completion(json: &Value) -> Request {
        Request::post("/v1/completions", json)
    }

    pub fn chat(json: &Value) -> Request {
        Request::post("/v1/chat/completions", json)
    }

    pub fn new(method: &str, path: &str, body: Vec<u8>) -> Request {
        let (method, path) = (method.to_owned(), path.to_owned());
        Request { method, path, headers: Vec::new(), body }
    }

    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Request {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    fn head(&self) -> String {
        let mut head = format!("{} {} HTTP/1.1\r\nhost: router\r\n", self.method, self.path);
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head + &format!("content-length: {}\r\n\r\n", self.body.len())
    }

    /// Sends all of it.
    pub async fn open(&self, to: SocketAddr) -> Exchange {
        let mut exchange = self.begin(to).await;
        exchange.send(&self.body).await;
        exchange
    }

    /// The same where the router may take no connection.
    pub async fn try_open(&self, to: SocketAddr) -> std::io::Result<Exchange> {
        let mut exchange = Exchange::over(connect(to).await?);
        exchange.send(self.head().as_bytes()).await;
        exchange.send(&self.body).await;
        Ok(exchange)
    }

    /// Sends all of it on a connection that takes in next to nothing that is not read.
    pub async fn open_narrow(&self, to: SocketAddr) -> Exchange {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(4096).expect("an option of every socket");
        let stream = timeout(SOON, socket.connect(to)).await.expect("connecting hangs");
        let mut exchange = Exchange::over(stream.expect("the router takes connections"));
        exchange.send(self.head().as_bytes()).await;
        exchange.send(&self.body).await;
        exchange
    }

    /// Sends the head alone; the body is for [`Exchange::send`].
    pub async fn begin(&self, to: SocketAddr) -> Exchange {
        let stream = connect(to).await.expect("the router takes connections");
        let mut exchange = Exchange::over(stream);
        exchange.send(self.head().as_bytes()).await;
        exchange
    }

    /// Sends all of it and reads the whole reply.
    pub async fn send(&self, to: SocketAddr) -> (Head, Body) {
        let mut exchange = self.open(to).await;
        let head = exchange.head().await;
        (head, exchange.rest().await)
    }

    /// The same with a body of JSON.
    pub async fn json(&self, to: SocketAddr) -> (Head, Value) {
        let (head, body) = self.send(to).await;
        (head, body.json())
    }
}

/// Connects, or tells why not.
pub async fn connect(to: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = timeout(SOON, TcpStream::connect(to)).await.expect("connecting hangs")?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The head of a reply.
#[derive(Clone, Debug)]
pub struct Head {
    pub status: u16,
    headers: Vec<(String, String)>,
}

impl Head {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    /// `x-pointsman-path`, or nothing.
    pub fn path(&self) -> &str {
        self.header("x-pointsman-path").unwrap_or_default()
    }

    /// `x-pointsman-reason`, or nothing.
    pub fn reason(&self) -> &str {
        self.header("x-pointsman-reason").unwrap_or_default()
    }

    /// `x-pointsman-worker`, or nothing.
    pub fn worker(&self) -> &str {
        self.header("x-pointsman-worker").unwrap_or_default()
    }
}

/// What is still to come of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// The head has not been read.
    Unknown,
    Bytes(usize),
    Chunked,
    UntilClose,
    Nothing,
}

/// A request under way. Dropping it is a client that leaves.
#[derive(Debug)]
pub struct Exchange {
    stream: TcpStream,
    read: Vec<u8>,
    head: Option<Head>,
    left: Left,
}

impl Exchange {
    fn over(stream: TcpStream) -> Exchange {
        Exchange { stream, read: Vec::new(), head: None, left: Left::Unknown }
    }

    /// Sends bytes as they are.
    pub async fn send(&mut self, bytes: &[u8]) {
        // A reply may come before all of the body is sent; then the rest is not wanted.
        let _ = self.stream.write_all(bytes).await;
    }

    /// Leaves with a reset, as a process that is killed.
    pub fn reset(self) {
        self.stream.set_zero_linger().expect("an option of every socket");
    }

    /// The head of the reply.
    ///
    /// # Panics
    /// When none comes soon.
    pub async fn head(&mut self) -> Head {
        self.head_within(SOON).await
    }

    pub async fn head_within(&mut self, wait: Duration) -> Head {
        match timeout(wait, self.try_head()).await {
            Ok(Some(head)) => head,
            Ok(None) => panic!("the router closed the connection without a reply"),
            Err(_) => panic!("the router sent no reply within {wait:?}"),
        }
    }

    /// The head of the reply; none when the connection ends before it.
    pub async fn try_head(&mut self) -> Option<Head> {
        if let Some(head) = &self.head {
            return Some(head.clone());
        }
        let end = loop {
            if let Some(at) = find(&self.read, b"\r\n\r\n") {
                break at;
            }
            if !self.read_more().await {
                return None;
            }
        };
        let text = String::from_utf8(self.read[..end].to_vec()).expect("a head of text");
        self.read.drain(..end + 4);
        let mut lines = text.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).expect("a status line");
        let headers = lines.filter_map(|line| line.split_once(':'));
        let head = Head {
            status: status.parse().expect("a status"),
            headers: headers.map(|(n, v)| (n.to_owned(), v.trim().to_owned())).collect(),
        };
        self.left = match (head.header("transfer-encoding"), head.header("content-length")) {
            (Some(coding), _) if coding.eq_ignore_ascii_case("chunked") => Left::Chunked,
            (_, Some(length)) => Left::Bytes(length.parse().expect("a length")),
            _ => Left::UntilClose,
        };
        self.head = Some(head.clone());
        Some(head)
    }

    /// The next piece of the body: `Ok(None)` at its end, an error where it is cut.
    pub async fn piece(&mut self) -> Result<Option<Vec<u8>>, Cut> {
        timeout(SOON, self.next_piece()).await.expect("the body goes on or ends soon")
    }

    async fn next_piece(&mut self) -> Result<Option<Vec<u8>>, Cut> {
        if self.head.is_none() {
            self.try_head().await.ok_or(Cut)?;
        }
        loop {
            match self.left {
                Left::Nothing | Left::Bytes(0) => return Ok(None),
                Left::Chunked => {
                    if let Some(chunk) = self.take_chunk() {
                        if chunk.is_empty() {
                            self.left = Left::Nothing;
                            return Ok(None);
                        }
                        return Ok(Some(chunk));
                    }
                    if !self.read_more().await {
                        return Err(Cut);
                    }
                }
                Left::Bytes(_) | Left::UntilClose => {
                    if self.read.is_empty() && !self.read_more().await {
                        return if self.left == Left::UntilClose { Ok(None) } else { Err(Cut) };
                    }
                    let mut piece = std::mem::take(&mut self.read);
                    if let Left::Bytes(left) = &mut self.left {
                        self.read = piece.split_off(piece.len().min(*left));
                        *left -= piece.len();
                    }
                    return Ok(Some(piece));
                }
                Left::Unknown => return Err(Cut),
            }
        }
    }

    fn take_chunk(&mut self) -> Option<Vec<u8>> {
        let line = find(&self.read, b"\r\n")?;
        let size = std::str::from_utf8(&self.read[..line]).expect("a chunk size");
        let size = usize::from_str_radix(size.split(';').next().unwrap_or(size).trim(), 16);
        let (start, size) = (line + 2, size.expect("a chunk size"));
        if self.read.len() < start + size + 2 {
            return None;
        }
        let chunk = self.read[start..start + size].to_vec();
        self.read.drain(..start + size + 2);
        Some(chunk)
    }

    async fn read_more(&mut self) -> bool {
        let mut buffer = [0; 16 * 1024];
        match self.stream.read(&mut buffer).await {
            Ok(0) | Err(_) => false,
            Ok(count) => {
                self.read.extend_from_slice(&buffer[..count]);
                true
            }
        }
    }

    /// Reads on until the text so far has this many events with content.
    pub async fn tokens(&mut self, wanted: usize) -> Body {
        let mut body = Body::default();
        while body.content_events() < wanted {
            match self.piece().await {
                Ok(Some(piece)) => body.bytes.extend(piece),
                end => {
                    panic!("{end:?} after {} tokens of {wanted}: {body:?}", body.content_events())
                }
            }
        }
        body
    }

    /// Everything up to the end, however it comes.
    pub async fn rest(&mut self) -> Body {
        let mut body = Body::default();
        loop {
            match self.piece().await {
                Ok(Some(piece)) => body.bytes.extend(piece),
                Ok(None) => return body,
                Err(Cut) => {
                    body.cut = true;
                    return body;
                }
            }
        }
    }
}

/// The connection ended in the middle of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut;

/// A body, whole or up to where it was cut.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Body {
    pub bytes: Vec<u8>,
    pub cut: bool,
}

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.text(), if self.cut { " -- CUT" } else { "" })
    }
}

impl Body {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// When it is cut or is none.
    pub fn json(&self) -> Value {
        assert!(!self.cut, "cut: {self:?}");
        serde_json::from_slice(&self.bytes).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// `message` of an OpenAI-shaped error.
    ///
    /// # Panics
    /// When it is none.
    pub fn error(&self) -> String {
        error_message(&self.json())
    }

    /// The `data` of each event of a stream.
    ///
    /// # Panics
    /// When what is there is anything else than whole events.
    pub fn events(&self) -> Vec<String> {
        let text = std::str::from_utf8(&self.bytes).expect("a stream of text");
        assert!(text.is_empty() || text.ends_with("\n\n"), "half an event at the end: {self:?}");
        let event = |event: &str| match event.strip_prefix("data: ") {
            Some(data) if !data.contains('\n') => data.to_owned(),
            _ => panic!("not an event of OpenAI's: {event:?}"),
        };
        text.split_terminator("\n\n").map(event).collect()
    }

    /// The events as JSON, `[DONE]` apart.
    pub fn chunks(&self) -> Vec<Value> {
        let events = self.events();
        let chunks = events.iter().filter(|event| *event != "[DONE]");
        chunks.map(|event| serde_json::from_str(event).expect("events of JSON")).collect()
    }

    fn content_events(&self) -> usize {
        let text = self.text();
        let whole = text.rfind("\n\n").map_or("", |end| &text[..end]);
        let events = whole.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        let chunks = events.filter_map(|data| serde_json::from_str::<Value>(data).ok());
        chunks.filter(|chunk| !content(chunk).is_empty()).count()
    }

    /// The text of all content events (choice 0).
    pub fn content(&self) -> String {
        self.chunks().iter().map(content).collect()
    }

    /// Whether the stream ended as it should.
    pub fn is_done(&self) -> bool {
        !self.cut && self.events().last().is_some_and(|event| event == "[DONE]")
    }
}

fn content(chunk: &Value) -> String {
    let choice = &chunk["choices"][0];
    let text = choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str());
    text.unwrap_or_default().to_owned()
}

/// The message of an error, whose shape is looked at.
///
/// # Panics
/// When `OpenAI`'s clients would not know it as one.
pub fn error_message(json: &Value) -> String {
    let error = &json["error"];
    let shaped = error["message"].is_string() && error["type"].is_string();
    assert!(shaped && error["code"].is_u64() && error.get("param").is_some(), "{json}");
    error["message"].as_str().unwrap_or_default().to_owned()
}

fn find(within: &[u8], what: &[u8]) -> Option<usize> {
    within.windows(what.len()).position(|window| window == what)
}
