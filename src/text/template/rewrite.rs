//! Rebuilds a template's syntax tree so that everything costly goes through our functions.
//!
//! | in the template | becomes |
//! | --- | --- |
//! | text between tags | an output of a constant, so that it is counted |
//! | `a + b`, `a * b`, `a % b`, `a ~ b` | a filter: `a \| §add(b)` ... |
//! | `a[b]`, `a[b:c:d]` | `a \| §item(b)`, `a \| §slice(b, c, d)` |
//! | `a < b`, `a in b` | a filter: `a \| §lt(b)` ... |
//! | `a == b`, `a < b < c` | the same of `a \| §walk` and `b \| §walk` |
//! | `{...}`, `[...]` | `{...} \| §map`, `[...] \| §list` |
//! | `for x in y`, `f(*y)` | `y \| §iter` |
//! | `set a.b = c` | `a \| §set("b", c)` |
//! | body of a loop, macro or block | begins with `n \| §tick`, n its number of nodes |
//!
//! The names begin with a character that no identifier may have, so templates cannot define or
//! shadow them. Left as they are: constants, `-`, `/`, `//`, `**` (numbers only), attribute access
//! by name, `and`, `or`, `not`, filters, tests and calls (which are all our own). Refused:
//! includes, imports, inheritance and auto-escaping, which no chat template has.

use crate::error::{Error, ErrorKind, Result};
use minijinja::machinery::ast::{self, BinOpKind, CallArg, Expr, Spanned, Stmt};
use minijinja::machinery::Span;
use minijinja::value::Value;

/// The deepest nesting of statements and expressions. minijinja's compiler tries to fold constants
/// again at each level, so its time grows with the square of this. `elif` counts.
const MAX_DEPTH: usize = 1000;

/// Rebuilds a whole template. Returns it and its deepest nesting of statements and expressions.
pub(super) fn rewrite<'a>(tree: &Stmt<'a>) -> Result<(Stmt<'a>, usize)> {
    let mut rewriter = Rewriter { num_nodes: 0, depth: 0, deepest: 0 };
    Ok((rewriter.stmt(tree)?, rewriter.deepest))
}

struct Rewriter {
    num_nodes: u64,
    depth: usize,
    deepest: usize,
}

impl Rewriter {
    fn enter(&mut self) -> Result<()> {
        self.num_nodes += 1;
        self.depth += 1;
        self.deepest = self.deepest.max(self.depth);
        if self.depth > MAX_DEPTH {
            return Err(refused(format!("it is nested more than {MAX_DEPTH} deep")));
        }
        Ok(())
    }

    fn stmts<'a>(&mut self, stmts: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>> {
        stmts.iter().map(|stmt| self.stmt(stmt)).collect()
    }

    /// Rebuilds a body that can run many times, with its price at the beginning.
    fn body<'a>(&mut self, stmts: &[Stmt<'a>], span: Span) -> Result<Vec<Stmt<'a>>> {
        let before = self.num_nodes;
        let rewritten = self.stmts(stmts)?;
        let price = constant(Value::from(self.num_nodes - before + 1), span);
        let mut body = Vec::with_capacity(rewritten.len() + 1);
        body.push(emit(filter("§tick", price, Vec::new(), span), span));
        body.extend(rewritten);
        Ok(body)
    }

    fn stmt<'a>(&mut self, stmt: &Stmt<'a>) -> Result<Stmt<'a>> {
        self.enter()?;
        let rewritten = match stmt {
            Stmt::Template(template) => {
                let children = self.stmts(&template.children)?;
                Stmt::Template(Spanned::new(ast::Template { children }, template.span()))
            }
            Stmt::EmitExpr(output) => emit(self.expr(&output.expr)?, output.span()),
            Stmt::EmitRaw(raw) => emit(constant(Value::from(raw.raw), raw.span()), raw.span()),
            Stmt::ForLoop(for_loop) => {
                let span = for_loop.span();
                let iter = self.expr(&for_loop.iter)?;
                // A loop with a filter runs over the items a second time.
                let filter_expr = match &for_loop.filter_expr {
                    Some(condition) => {
                        let condition = self.expr(condition)?;
                        Some(filter("§paid", condition, Vec::new(), span))
                    }
                    None => None,
                };
                let node = ast::ForLoop {
                    target: self.target(&for_loop.target)?,
                    iter: filter("§iter", iter, Vec::new(), span),
                    filter_expr,
                    recursive: for_loop.recursive,
                    body: self.body(&for_loop.body, span)?,
                    else_body: self.stmts(&for_loop.else_body)?,
                };
                Stmt::ForLoop(Spanned::new(node, span))
            }
            Stmt::IfCond(condition) => {
                let node = ast::IfCond {
                    expr: self.expr(&condition.expr)?,
                    true_body: self.stmts(&condition.true_body)?,
                    false_body: self.stmts(&condition.false_body)?,
                };
                Stmt::IfCond(Spanned::new(node, condition.span()))
            }
            Stmt::WithBlock(block) => {
                let mut assignments = Vec::with_capacity(block.assignments.len());
                for (target, value) in &block.assignments {
                    assignments.push((self.target(target)?, self.expr(value)?));
                }
                let body = self.stmts(&block.body)?;
                Stmt::WithBlock(Spanned::new(ast::WithBlock { assignments, body }, block.span()))
            }
            Stmt::Set(set) => {
                let span = set.span();
                let value = self.expr(&set.expr)?;
                match &set.target {
                    Expr::GetAttr(attr) => self.set_attribute(attr, value, span)?,
                    target => {
                        let node = ast::Set { target: self.target(target)?, expr: value };
                        Stmt::Set(Spanned::new(node, span))
                    }
                }
            }
            Stmt::SetBlock(block) => self.set_block(block)?,
            Stmt::FilterBlock(block) => {
                let node = ast::FilterBlock {
                    filter: self.expr(&block.filter)?,
                    body: self.stmts(&block.body)?,
                };
                Stmt::FilterBlock(Spanned::new(node, block.span()))
            }
            Stmt::Block(block) => {
                let node = ast::Block {
                    name: block.name,
                    required: block.required,
                    body: self.body(&block.body, block.span())?,
                };
                Stmt::Block(Spanned::new(node, block.span()))
            }
            Stmt::Macro(declaration) => Stmt::Macro(self.macro_declaration(declaration)?),
            Stmt::CallBlock(block) => {
                let node = ast::CallBlock {
                    call: self.call(&block.call)?,
                    macro_decl: self.macro_declaration(&block.macro_decl)?,
                };
                Stmt::CallBlock(Spanned::new(node, block.span()))
            }
            Stmt::Continue(tag) => Stmt::Continue(Spanned::new(ast::Continue, tag.span())),
            Stmt::Break(tag) => Stmt::Break(Spanned::new(ast::Break, tag.span())),
            Stmt::Do(tag) => {
                let call = self.call(&tag.call)?;
                Stmt::Do(Spanned::new(ast::Do { call }, tag.span()))
            }
            Stmt::Include(_) | Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) => {
                return Err(refused("it refers to another template"))
            }
            Stmt::AutoEscape(_) => return Err(refused("it uses autoescape")),
        };
        self.depth -= 1;
        Ok(rewritten)
    }

    /// Rebuilds `{% set name %}...{% endset %}`; an attribute is set by way of a variable in a
    /// scope of its own.
    fn set_block<'a>(&mut self, block: &Spanned<ast::SetBlock<'a>>) -> Result<Stmt<'a>> {
        let span = block.span();
        let filter = block.filter.as_ref().map(|f| self.expr(f)).transpose()?;
        let body = self.stmts(&block.body)?;
        let Expr::GetAttr(attr) = &block.target else {
            let node = ast::SetBlock { target: self.target(&block.target)?, filter, body };
            return Ok(Stmt::SetBlock(Spanned::new(node, span)));
        };
        let name = || Expr::Var(Spanned::new(ast::Var { id: "§captured" }, span));
        let capture = ast::SetBlock { target: name(), filter, body };
        let node = ast::WithBlock {
            assignments: Vec::new(),
            body: vec![
                Stmt::SetBlock(Spanned::new(capture, span)),
                self.set_attribute(attr, name(), span)?,
            ],
        };
        Ok(Stmt::WithBlock(Spanned::new(node, span)))
    }

    fn set_attribute<'a>(
        &mut self,
        attr: &Spanned<ast::GetAttr<'a>>,
        value: Expr<'a>,
        span: Span,
    ) -> Result<Stmt<'a>> {
        let namespace = self.expr(&attr.expr)?;
        let name = constant(Value::from(attr.name), span);
        Ok(emit(filter("§set", namespace, vec![name, value], span), span))
    }

    /// Rebuilds the target of an assignment: names, and lists of them.
    fn target<'a>(&mut self, target: &Expr<'a>) -> Result<Expr<'a>> {
        self.enter()?;
        let rewritten = match target {
            Expr::Var(var) => Expr::Var(Spanned::new(ast::Var { id: var.id }, var.span())),
            Expr::List(list) => {
                let items =
                    list.items.iter().map(|item| self.target(item)).collect::<Result<_>>()?;
                Expr::List(Spanned::new(ast::List { items }, list.span()))
            }
            Expr::GetAttr(_) => {
                return Err(refused("it assigns to an attribute elsewhere than in a plain set"))
            }
            _ => return Err(refused("it assigns to something that is not a name")),
        };
        self.depth -= 1;
        Ok(rewritten)
    }

    fn macro_declaration<'a>(
        &mut self,
        declaration: &Spanned<ast::Macro<'a>>,
    ) -> Result<Spanned<ast::Macro<'a>>> {
        let node = ast::Macro {
            name: declaration.name,
            args: declaration.args.iter().map(|arg| self.target(arg)).collect::<Result<_>>()?,
            defaults: self.exprs(&declaration.defaults)?,
            body: self.body(&declaration.body, declaration.span())?,
        };
        Ok(Spanned::new(node, declaration.span()))
    }

    fn exprs<'a>(&mut self, exprs: &[Expr<'a>]) -> Result<Vec<Expr<'a>>> {
        exprs.iter().map(|expr| self.expr(expr)).collect()
    }

    fn optional<'a>(&mut self, expr: &Option<Expr<'a>>, span: Span) -> Result<Expr<'a>> {
        match expr {
            Some(expr) => self.expr(expr),
            None => Ok(constant(Value::from(()), span)),
        }
    }

    /// Rebuilds an operand that minijinja will walk, paid for in advance. Constants are part of the
    /// source and small.
    fn walked<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>> {
        let rewritten = self.expr(expr)?;
        if matches!(rewritten, Expr::Const(_)) {
            return Ok(rewritten);
        }
        let span = rewritten.span();
        Ok(filter("§walk", rewritten, Vec::new(), span))
    }

    fn expr<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>> {
        self.enter()?;
        let rewritten = match expr {
            Expr::Var(var) => Expr::Var(Spanned::new(ast::Var { id: var.id }, var.span())),
            Expr::Const(value) => constant(value.value.clone(), value.span()),
            Expr::Slice(slice) => {
                let span = slice.span();
                let value = self.expr(&slice.expr)?;
                let bounds = vec![
                    self.optional(&slice.start, span)?,
                    self.optional(&slice.stop, span)?,
                    self.optional(&slice.step, span)?,
                ];
                filter("§slice", value, bounds, span)
            }
            Expr::UnaryOp(unary) => {
                let op = if matches!(unary.op, ast::UnaryOpKind::Not) {
                    ast::UnaryOpKind::Not
                } else {
                    ast::UnaryOpKind::Neg
                };
                let node = ast::UnaryOp { op, expr: self.expr(&unary.expr)? };
                Expr::UnaryOp(Spanned::new(node, unary.span()))
            }
            Expr::BinOp(binary) => self.binary(binary)?,
            Expr::Compare(compare) => {
                let first = self.walked(&compare.expr)?;
                let mut ops = Vec::with_capacity(compare.ops.len());
                for op in &compare.ops {
                    ops.push(ast::CompareOp { op: op.op, expr: self.walked(&op.expr)? });
                }
                let node = ast::Compare { expr: first, ops };
                Expr::Compare(Spanned::new(node, compare.span()))
            }
            Expr::IfExpr(condition) => {
                let node = ast::IfExpr {
                    test_expr: self.expr(&condition.test_expr)?,
                    true_expr: self.expr(&condition.true_expr)?,
                    false_expr: match &condition.false_expr {
                        Some(expr) => Some(self.expr(expr)?),
                        None => None,
                    },
                };
                Expr::IfExpr(Spanned::new(node, condition.span()))
            }
            Expr::Filter(applied) => {
                // Inside a filter block the operand is missing: it is the captured text.
                let operand = match &applied.expr {
                    Some(expr) => Some(self.expr(expr)?),
                    None => None,
                };
                let node = ast::Filter {
                    name: applied.name,
                    expr: operand,
                    args: self.args(&applied.args)?,
                };
                Expr::Filter(Spanned::new(node, applied.span()))
            }
            Expr::Test(test) => {
                let node = ast::Test {
                    name: test.name,
                    expr: self.expr(&test.expr)?,
                    args: self.args(&test.args)?,
                };
                Expr::Test(Spanned::new(node, test.span()))
            }
            Expr::GetAttr(attr) => {
                let node = ast::GetAttr { expr: self.expr(&attr.expr)?, name: attr.name };
                Expr::GetAttr(Spanned::new(node, attr.span()))
            }
            Expr::GetItem(item) => {
                let value = self.expr(&item.expr)?;
                let key = self.expr(&item.subscript_expr)?;
                filter("§item", value, vec![key], item.span())
            }
            Expr::Call(call) => Expr::Call(self.call(call)?),
            Expr::List(list) => {
                let node = ast::List { items: self.exprs(&list.items)? };
                let span = list.span();
                filter("§list", Expr::List(Spanned::new(node, span)), Vec::new(), span)
            }
            Expr::Tuple(tuple) => {
                let node = ast::Tuple { items: self.exprs(&tuple.items)? };
                let span = tuple.span();
                filter("§list", Expr::Tuple(Spanned::new(node, span)), Vec::new(), span)
            }
            Expr::Map(map) => {
                let keys = map.keys.iter().map(|key| self.walked(key)).collect::<Result<_>>()?;
                let node = ast::Map { keys, values: self.exprs(&map.values)? };
                let span = map.span();
                filter("§map", Expr::Map(Spanned::new(node, span)), Vec::new(), span)
            }
        };
        self.depth -= 1;
        Ok(rewritten)
    }

    fn binary<'a>(&mut self, binary: &Spanned<ast::BinOp<'a>>) -> Result<Expr<'a>> {
        let span = binary.span();
        let name = match binary.op {
            BinOpKind::Add => Some("§add"),
            BinOpKind::Mul => Some("§mul"),
            BinOpKind::Rem => Some("§rem"),
            BinOpKind::Concat => Some("§concat"),
            _ => None,
        };
        if let Some(name) = name {
            let left = self.expr(&binary.left)?;
            let right = self.expr(&binary.right)?;
            return Ok(filter(name, left, vec![right], span));
        }
        // Comparisons whose operands have to be of the same kind, unless they are in a chain.
        let name = match binary.op {
            BinOpKind::Lt => Some("§lt"),
            BinOpKind::Lte => Some("§le"),
            BinOpKind::Gt => Some("§gt"),
            BinOpKind::Gte => Some("§ge"),
            BinOpKind::In => Some("§in"),
            _ => None,
        };
        if let Some(name) = name {
            let (left, right) = (self.walked(&binary.left)?, self.walked(&binary.right)?);
            return Ok(filter(name, left, vec![right], span));
        }
        let (left, right) = match binary.op {
            BinOpKind::ScAnd | BinOpKind::ScOr => {
                (self.expr(&binary.left)?, self.expr(&binary.right)?)
            }
            _ => (self.walked(&binary.left)?, self.walked(&binary.right)?),
        };
        Ok(Expr::BinOp(Spanned::new(ast::BinOp { op: binary.op, left, right }, span)))
    }

    fn call<'a>(&mut self, call: &Spanned<ast::Call<'a>>) -> Result<Spanned<ast::Call<'a>>> {
        let mut args = self.args(&call.args)?;
        let expr = match &call.expr {
            Expr::Var(var) => Expr::Var(Spanned::new(ast::Var { id: var.id }, var.span())),
            Expr::GetAttr(attr) => {
                // loop.changed() compares with its previous arguments.
                if attr.name == "changed" {
                    args = args.into_iter().map(walked_arg).collect();
                }
                let node = ast::GetAttr { expr: self.expr(&attr.expr)?, name: attr.name };
                Expr::GetAttr(Spanned::new(node, attr.span()))
            }
            other => self.expr(other)?,
        };
        Ok(Spanned::new(ast::Call { expr, args }, call.span()))
    }

    fn args<'a>(&mut self, args: &[CallArg<'a>]) -> Result<Vec<CallArg<'a>>> {
        args.iter()
            .map(|arg| {
                Ok(match arg {
                    CallArg::Pos(expr) => CallArg::Pos(self.expr(expr)?),
                    CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, self.expr(expr)?),
                    CallArg::PosSplat(expr) => CallArg::PosSplat(self.splat(expr)?),
                    CallArg::KwargSplat(expr) => CallArg::KwargSplat(self.splat(expr)?),
                })
            })
            .collect()
    }

    fn splat<'a>(&mut self, expr: &Expr<'a>) -> Result<Expr<'a>> {
        let span = expr.span();
        let rewritten = self.expr(expr)?;
        Ok(filter("§splat", rewritten, Vec::new(), span))
    }
}

fn walked_arg(arg: CallArg<'_>) -> CallArg<'_> {
    match arg {
        CallArg::Pos(expr) => {
            let span = expr.span();
            CallArg::Pos(filter("§walk", expr, Vec::new(), span))
        }
        other => other,
    }
}

fn constant<'a>(value: Value, span: Span) -> Expr<'a> {
    Expr::Const(Spanned::new(ast::Const { value }, span))
}

fn filter<'a>(name: &'static str, operand: Expr<'a>, args: Vec<Expr<'a>>, span: Span) -> Expr<'a> {
    let args = args.into_iter().map(CallArg::Pos).collect();
    Expr::Filter(Spanned::new(ast::Filter { name, expr: Some(operand), args }, span))
}

fn emit<'a>(expr: Expr<'a>, span: Span) -> Stmt<'a> {
    Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr }, span))
}

fn refused(why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Template, format!("chat template: {why}"))
}
