//! Headless Chromium, controlled with the `DevTools` protocol over two pipes.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::{Signal, killpg};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, geteuid, mkfifo};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::wait::{self, DEADLINE};

/// A browser with one page.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    commands: File,
    answers: Receiver<Value>,
    session: String,
    next: u64,
    /// The number of loaded pages.
    loaded: u64,
    requests: Vec<String>,
    problems: Vec<String>,
    _folder: TempDir,
}

/// A kind of screen.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    pub width: u32,
    pub height: u32,
    pub dark: bool,
}

impl Browser {
    /// Starts the browser.
    pub fn start() -> io::Result<Self> {
        let program = which::which("chromium").map_err(|_| {
            io::Error::other(
                "`chromium` is missing; `cargo xtask setup` installs it (Debian: chromium)",
            )
        })?;
        let folder = tempfile::tempdir()?;
        let pipes = ["in", "out"].map(|name| folder.path().join(name));
        for pipe in &pipes {
            mkfifo(pipe, Mode::S_IRWXU)?;
        }
        let mut command = Command::new("sh");
        command
            // The browser reads commands from descriptor 3 and writes responses to descriptor 4.
            .args(["-c", r#"exec "$0" "$@" 3<"$COMMANDS" 4>"$ANSWERS""#])
            .arg(program)
            .args([
                "--headless",
                "--remote-debugging-pipe",
                "--no-first-run",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-component-update",
                "--no-proxy-server",
            ])
            .arg(format!(
                "--user-data-dir={}",
                folder.path().join("profile").display()
            ))
            // The browser's sandbox does not work for root.
            .args(geteuid().is_root().then_some("--no-sandbox"))
            .env("HOME", folder.path())
            .env("COMMANDS", &pipes[0])
            .env("ANSWERS", &pipes[1])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // The group is for the end: the browser has many processes.
            .process_group(0);
        let child = command.spawn()?;
        let commands = OpenOptions::new().write(true).open(&pipes[0])?;
        let read = File::open(&pipes[1])?;
        let (sender, answers) = channel();
        thread::spawn(move || {
            for message in BufReader::new(read).split(0).map_while(Result::ok) {
                let message = serde_json::from_slice(&message).unwrap_or_default();
                if sender.send(message).is_err() {
                    break;
                }
            }
        });
        let mut browser = Self {
            child,
            commands,
            answers,
            session: String::new(),
            next: 0,
            loaded: 0,
            requests: Vec::new(),
            problems: Vec::new(),
            _folder: folder,
        };
        let target = browser.call("Target.createTarget", &json!({"url": "about:blank"}))?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", &attach)?;
        browser.session = text(&attached["sessionId"])?;
        for domain in ["Page", "Network", "Log", "Runtime"] {
            browser.call(&format!("{domain}.enable"), &json!({}))?;
        }
        Ok(browser)
    }

    /// Opens a URL, and waits until the page is loaded.
    pub fn open(&mut self, url: &str) -> io::Result<()> {
        let before = self.loaded;
        let opened = self.call("Page.navigate", &json!({ "url": url }))?;
        if let Some(error) = opened["errorText"].as_str() {
            return Err(io::Error::other(format!("{url}: {error}")));
        }
        self.until_loaded(before)
    }

    fn until_loaded(&mut self, before: u64) -> io::Result<()> {
        while self.loaded == before {
            self.wait(|message| message["method"] == "Page.loadEventFired")?;
        }
        Ok(())
    }

    /// Allows or forbids scripts in pages.
    pub fn allow_scripts(&mut self, allow: bool) -> io::Result<()> {
        let value = json!({"value": !allow});
        self.call("Emulation.setScriptExecutionDisabled", &value)
            .map(drop)
    }

    /// Sets the screen.
    pub fn show_on(&mut self, screen: Screen) -> io::Result<()> {
        let metrics = json!({
            "width": screen.width, "height": screen.height, "deviceScaleFactor": 1, "mobile": screen.width < 600,
        });
        self.call("Emulation.setDeviceMetricsOverride", &metrics)?;
        let scheme = if screen.dark { "dark" } else { "light" };
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", &media).map(drop)
    }

    /// Types a text into the field that has `autofocus`, presses Enter, and waits until the next page is loaded.
    pub fn enter(&mut self, typed: &str) -> io::Result<()> {
        let document = self.call("DOM.getDocument", &json!({}))?;
        let query = json!({"nodeId": document["root"]["nodeId"], "selector": "[autofocus]"});
        let field = self.call("DOM.querySelector", &query)?;
        // A page that has just been loaded may not have moved the focus yet.
        self.call("DOM.focus", &json!({"nodeId": field["nodeId"]}))?;
        self.call("Input.insertText", &json!({ "text": typed }))?;
        let before = self.loaded;
        for kind in ["keyDown", "keyUp"] {
            let key = json!({"type": kind, "key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"});
            self.call("Input.dispatchKeyEvent", &key)?;
        }
        self.until_loaded(before)
    }

    /// Returns the value of an expression in the page.
    pub fn value(&mut self, expression: &str) -> io::Result<Value> {
        let parameters =
            json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", &parameters)?;
        match answer.get("exceptionDetails") {
            Some(error) => Err(io::Error::other(format!("{expression}: {error}"))),
            None => Ok(answer["result"]["value"].clone()),
        }
    }

    /// Returns the current page as HTML.
    pub fn html(&mut self) -> io::Result<String> {
        let document = self.call("DOM.getDocument", &json!({}))?;
        let node = json!({"nodeId": document["root"]["nodeId"]});
        text(&self.call("DOM.getOuterHTML", &node)?["outerHTML"])
    }

    /// Waits until the page contains a text, and returns the page.
    pub fn until(&mut self, expected: &str) -> io::Result<String> {
        let found = wait::within_blocking(DEADLINE, expected, || {
            // While a page loads, there may be none.
            let html = self.html()?;
            if html.contains(expected) {
                return Ok(html);
            }
            Err(io::Error::other(format!("it is not in\n{html}")))
        });
        found.map_err(io::Error::other)
    }

    /// Stores a screenshot of the whole page as PNG.
    pub fn screenshot(&mut self, file: &Path) -> io::Result<()> {
        let metrics = self.call("Page.getLayoutMetrics", &json!({}))?;
        let mut clip = metrics["cssContentSize"].clone();
        clip["scale"] = 1.into();
        let whole = json!({"captureBeyondViewport": true, "clip": clip});
        let picture = self.call("Page.captureScreenshot", &whole)?;
        let bytes = STANDARD
            .decode(text(&picture["data"])?)
            .map_err(io::Error::other)?;
        std::fs::write(file, bytes)
    }

    /// Returns all requested URLs.
    pub fn requests(&self) -> &[String] {
        &self.requests
    }

    /// Returns the errors of scripts and the violations of the page's policy.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    fn call(&mut self, method: &str, parameters: &Value) -> io::Result<Value> {
        self.next += 1;
        let id = self.next;
        let mut command = json!({"id": id, "method": method, "params": parameters});
        if !self.session.is_empty() {
            command["sessionId"] = self.session.clone().into();
        }
        let mut bytes = command.to_string().into_bytes();
        bytes.push(0);
        self.commands.write_all(&bytes)?;
        let answer = self.wait(|message| message["id"] == id)?;
        match answer.get("error") {
            Some(error) => Err(io::Error::other(format!("{method}: {error}"))),
            None => Ok(answer["result"].clone()),
        }
    }

    fn wait(&mut self, matches: impl Fn(&Value) -> bool) -> io::Result<Value> {
        let until = Instant::now() + DEADLINE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let message = self
                .answers
                .recv_timeout(left)
                .map_err(|_| io::Error::other("the browser does not answer"))?;
            self.record(&message);
            if matches(&message) {
                return Ok(message);
            }
        }
    }

    fn record(&mut self, message: &Value) {
        let parameters = &message["params"];
        match message["method"].as_str() {
            Some("Network.requestWillBeSent") => {
                let url = parameters["request"]["url"].as_str();
                self.requests.extend(url.map(str::to_owned));
            }
            Some("Page.loadEventFired") => self.loaded += 1,
            Some("Log.entryAdded") if parameters["entry"]["level"] == "error" => {
                self.problems.push(parameters["entry"].to_string());
            }
            Some("Runtime.exceptionThrown") => self.problems.push(parameters.to_string()),
            _ => {}
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if let Ok(group) = i32::try_from(self.child.id()) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        }
        drop(self.child.wait());
    }
}

fn text(value: &Value) -> io::Result<String> {
    let text = value.as_str().map(str::to_owned);
    text.ok_or_else(|| io::Error::other(format!("the browser answered {value}")))
}
