//! Whether a template iterates over a message's content or takes it as a string.
//!
//! The rules are vLLM's own, step by step, because its engine shapes the content by them: a loop
//! over `content` of a loop variable over `messages` (through assignments, filters, tests, slices and
//! macro parameters), or over a variable called `content` outside macros.

use minijinja::machinery::ast::{Call, CallArg, Expr, ForLoop, Macro, Set, Stmt};
use minijinja::machinery::parse;
use minijinja::syntax::SyntaxConfig;

use crate::conversation::ContentFormat;

/// Bound on the variables followed from `messages`; assignments in a circle would not end.
const MAX_ALIASES: usize = 1000;

/// What vLLM's assertions refuse: it then takes the template as one that wants strings.
struct Unclear;

pub(crate) fn content_format(source: &str) -> ContentFormat {
    let Ok(root) = parse(source, "template", SyntaxConfig::default()) else {
        return ContentFormat::Text;
    };
    let mut found = Found::default();
    found.statement(&root);
    match found.loops_over_content() {
        Ok(true) => ContentFormat::Parts,
        Ok(false) | Err(Unclear) => ContentFormat::Text,
    }
}

/// The nodes that matter, in document order.
#[derive(Default)]
struct Found<'n, 's> {
    sets: Vec<&'n Set<'s>>,
    /// Loops, and the index of the innermost macro around each.
    loops: Vec<(&'n ForLoop<'s>, Option<usize>)>,
    macros: Vec<&'n Macro<'s>>,
    calls: Vec<&'n Call<'s>>,
    inside: Option<usize>,
}

impl<'n, 's> Found<'n, 's> {
    fn loops_over_content(&self) -> Result<bool, Unclear> {
        let messages = self.aliases_of_messages()?;
        let mut items = Vec::new();
        for (node, _) in &self.loops {
            if messages.iter().any(|m| reads(&node.iter, m, None)) {
                items.push(variable(&node.target)?);
            }
        }
        let is_content = |e: &Expr<'_>| items.iter().any(|item| reads(e, item, Some("content")));
        let parameters: Vec<Vec<&str>> =
            self.macros.iter().map(|m| self.content_parameters(m, &is_content)).collect();
        for (node, inside) in &self.loops {
            let by_parameter = match (&node.iter, inside) {
                (Expr::Var(v), Some(i)) => parameters[*i].contains(&v.id),
                (Expr::Var(v), None) => v.id == "content",
                _ => false,
            };
            if is_content(&node.iter) || by_parameter {
                variable(&node.target)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn aliases_of_messages(&self) -> Result<Vec<&'s str>, Unclear> {
        let mut names = vec!["messages"];
        let mut next = 0;
        while let Some(&name) = names.get(next) {
            next += 1;
            for set in self.sets.iter().filter(|s| reads(&s.expr, name, None)) {
                let target = variable(&set.target)?;
                if target != name {
                    names.push(target);
                }
            }
            if names.len() > MAX_ALIASES {
                return Err(Unclear);
            }
        }
        Ok(names)
    }

    /// Parameters of a macro that receive a message's content in some call.
    fn content_parameters(
        &self,
        node: &Macro<'s>,
        is_content: &impl Fn(&Expr<'_>) -> bool,
    ) -> Vec<&'s str> {
        let names: Vec<&'s str> = node.args.iter().filter_map(|a| variable(a).ok()).collect();
        let mut found = Vec::new();
        let calls =
            self.calls.iter().filter(|c| matches!(&c.expr, Expr::Var(v) if v.id == node.name));
        for call in calls {
            let mut position = 0;
            for arg in &call.args {
                match arg {
                    CallArg::Pos(e) => {
                        found.extend(names.get(position).copied().filter(|_| is_content(e)));
                        position += 1;
                    }
                    CallArg::Kwarg(key, e) if is_content(e) => {
                        found.extend(names.iter().copied().find(|n| n == key));
                    }
                    _ => {}
                }
            }
        }
        found
    }

    fn statements(&mut self, list: &'n [Stmt<'s>]) {
        list.iter().for_each(|s| self.statement(s));
    }

    fn statement(&mut self, node: &'n Stmt<'s>) {
        match node {
            Stmt::Template(n) => self.statements(&n.children),
            Stmt::EmitExpr(n) => self.expression(&n.expr),
            Stmt::ForLoop(n) => {
                self.loops.push((n, self.inside));
                self.expression(&n.iter);
                n.filter_expr.iter().for_each(|e| self.expression(e));
                self.statements(&n.body);
                self.statements(&n.else_body);
            }
            Stmt::IfCond(n) => {
                self.expression(&n.expr);
                self.statements(&n.true_body);
                self.statements(&n.false_body);
            }
            Stmt::WithBlock(n) => {
                n.assignments.iter().for_each(|(_, e)| self.expression(e));
                self.statements(&n.body);
            }
            Stmt::Set(n) => {
                self.sets.push(n);
                self.expression(&n.expr);
            }
            Stmt::SetBlock(n) => self.statements(&n.body),
            Stmt::AutoEscape(n) => self.statements(&n.body),
            Stmt::FilterBlock(n) => {
                self.expression(&n.filter);
                self.statements(&n.body);
            }
            Stmt::Macro(n) => self.macro_body(n),
            Stmt::CallBlock(n) => {
                self.call(&n.call);
                self.statements(&n.macro_decl.body);
            }
            Stmt::Do(n) => self.call(&n.call),
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
        }
    }

    fn macro_body(&mut self, node: &'n Macro<'s>) {
        let outer = self.inside.replace(self.macros.len());
        self.macros.push(node);
        self.statements(&node.body);
        self.inside = outer;
    }

    fn call(&mut self, node: &'n Call<'s>) {
        self.calls.push(node);
        self.expression(&node.expr);
        self.arguments(&node.args);
    }

    fn arguments(&mut self, args: &'n [CallArg<'s>]) {
        for arg in args {
            let (CallArg::Pos(e)
            | CallArg::Kwarg(_, e)
            | CallArg::PosSplat(e)
            | CallArg::KwargSplat(e)) = arg;
            self.expression(e);
        }
    }

    /// Looks for calls: nothing else that matters stands within expressions.
    fn expression(&mut self, node: &'n Expr<'s>) {
        match node {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(n) => self.expression(&n.expr),
            Expr::UnaryOp(n) => self.expression(&n.expr),
            Expr::BinOp(n) => {
                self.expression(&n.left);
                self.expression(&n.right);
            }
            Expr::Compare(n) => {
                self.expression(&n.expr);
                n.ops.iter().for_each(|op| self.expression(&op.expr));
            }
            Expr::IfExpr(n) => {
                self.expression(&n.test_expr);
                self.expression(&n.true_expr);
                n.false_expr.iter().for_each(|e| self.expression(e));
            }
            Expr::Filter(n) => {
                n.expr.iter().for_each(|e| self.expression(e));
                self.arguments(&n.args);
            }
            Expr::Test(n) => {
                self.expression(&n.expr);
                self.arguments(&n.args);
            }
            Expr::GetAttr(n) => self.expression(&n.expr),
            Expr::GetItem(n) => {
                self.expression(&n.expr);
                self.expression(&n.subscript_expr);
            }
            Expr::Call(n) => self.call(n),
            Expr::List(n) => n.items.iter().for_each(|e| self.expression(e)),
            Expr::Tuple(n) => n.items.iter().for_each(|e| self.expression(e)),
            Expr::Map(n) => n.keys.iter().chain(&n.values).for_each(|e| self.expression(e)),
        }
    }
}

fn variable<'s>(target: &Expr<'s>) -> Result<&'s str, Unclear> {
    if let Expr::Var(v) = target { Ok(v.id) } else { Err(Unclear) }
}

/// Whether `e` is the variable `name` (or its member `key`), possibly filtered, tested or sliced.
fn reads(e: &Expr<'_>, name: &str, key: Option<&str>) -> bool {
    match (e, key) {
        (Expr::Filter(f), _) => f.expr.as_ref().is_some_and(|inner| reads(inner, name, key)),
        (Expr::Test(t), _) => reads(&t.expr, name, key),
        (Expr::Slice(s), _) => reads(&s.expr, name, key),
        (Expr::Var(v), None) => v.id == name,
        (Expr::GetAttr(a), Some(key)) => a.name == key && reads_variable(&a.expr, name),
        (Expr::GetItem(i), Some(key)) => {
            let constant =
                matches!(&i.subscript_expr, Expr::Const(c) if c.value.as_str() == Some(key));
            constant && reads_variable(&i.expr, name)
        }
        _ => false,
    }
}

fn reads_variable(e: &Expr<'_>, name: &str) -> bool {
    matches!(e, Expr::Var(v) if v.id == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_as_vllm_tells_them() {
        let golden = include_bytes!("../../tests/parity/golden.json");
        let golden: serde_json::Value = serde_json::from_slice(golden).unwrap();
        for case in golden["detect"].as_array().unwrap() {
            let source = case[0].as_str().unwrap();
            let source = super::super::environment::without_generation_tags(source);
            let expected = match case[1].as_str().unwrap() {
                "openai" => ContentFormat::Parts,
                _ => ContentFormat::Text,
            };
            assert_eq!(content_format(&source), expected, "{source}");
        }
    }

    #[test]
    fn assignments_in_a_circle_end() {
        let source =
            "{% set a = messages %}{% set b = a %}{% set a = b %}{% for m in a %}{% endfor %}";
        assert_eq!(content_format(source), ContentFormat::Text);
    }
}
