//! Chat templates as transformers renders them, on minijinja.
//!
//! Bounded: an instruction and size budget per rendering, and no template can reach anything but
//! the values it is given. A template comes with the model and is trusted as far as it: one made to
//! nest lists a hundred thousand deep could still overflow the stack; no request can.
//! Not here: what the messages look like (conversation).

mod detect;
mod environment;
mod float;
mod pycompat;
mod strftime;
mod tojson;

use minijinja::Environment;
use minijinja::value::Value;

pub(crate) use detect::content_format;
pub(crate) use pycompat::{trim, trim_end};

use crate::conversation::ContentFormat;
use crate::{Error, json};

/// One compiled template.
#[derive(Debug)]
pub(crate) struct Template {
    env: Environment<'static>,
    name: String,
    /// What it iterates over in a message's content.
    pub(crate) format: ContentFormat,
    /// Whether it knows the developer role.
    pub(crate) developer: bool,
    /// Whether it reads a message's `content` at all.
    pub(crate) reads_content: bool,
}

impl Template {
    /// Compiles `source`; `name` is what errors call it.
    pub(crate) fn compile(name: &str, source: &str) -> Result<Template, Error> {
        let mut env = environment::new();
        let plain = environment::without_generation_tags(source);
        let format = content_format(&plain);
        env.add_template_owned(name.to_owned(), plain).map_err(|e| failed(name, &e))?;
        Ok(Template {
            env,
            name: name.to_owned(),
            format,
            developer: source.contains("\"developer\"") || source.contains("'developer'"),
            reads_content: source.contains("content"),
        })
    }

    /// Renders with these variables, at time `now` (seconds since the epoch, local).
    pub(crate) fn render(
        &self,
        variables: impl IntoIterator<Item = (String, Value)>,
        now: i64,
    ) -> Result<String, Error> {
        let clock = ("strftime_now".to_owned(), environment::strftime_now(now));
        let context = json::object(std::iter::once(clock).chain(variables));
        self.env
            .get_template(&self.name)
            .and_then(|t| t.render(context))
            .map_err(|e| failed(&self.name, &e))
    }

    /// An error of this template in the words of `what`.
    pub(crate) fn error(&self, what: &str) -> Error {
        Error::Template { template: self.name.clone(), what: what.to_owned() }
    }
}

fn failed(name: &str, error: &minijinja::Error) -> Error {
    let mut what = match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    };
    if let Some(line) = error.line() {
        what.push_str(&format!(" (line {line})"));
    }
    Error::Template { template: name.to_owned(), what }
}
