#!/usr/bin/env node
// Pi as an ACP agent on stdio that can do what Pi itself can.
//
//     node acp.mjs
//
// `pi-acp`, the adapter, passes neither MCP servers nor instructions on to Pi, and Pi asks nobody for permission. This
// stands in front of it: it lays the extension beside it (hearth.ts), which does all three, into Pi's directory, and
// gives it what a session is opened with by a variable, so that no secret of a server lies on a disk. Everything else
// goes through as it is.
//
// PATH must have `pi-acp`, `pi` and the Node that they run on. HEARTH_PI_ACP names another `pi-acp`, HEARTH_PI_CONFIG
// a directory whose files (models.json, settings.json, mcp.json …) are copied into Pi's at each start.

import { spawn } from "node:child_process";
import { copyFileSync, cpSync, mkdirSync } from "node:fs";
import { homedir } from "node:os";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const EXTENSION = join(dirname(fileURLToPath(import.meta.url)), "hearth.ts");
const VARIABLE = "HEARTH_PI_SESSION";
// Linux takes no variable over 128 KiB.
const VARIABLE_BYTES = 120 * 1024;
const OPENING = new Set(["session/new", "session/load"]);
// An id of ours, for greeting an adapter that was started anew.
const GREETING = "hearth-pi-greeting";
const EXIT_MS = 2000;

function configure() {
  const directory = process.env.PI_CODING_AGENT_DIR || join(homedir(), ".pi", "agent");
  mkdirSync(join(directory, "extensions"), { recursive: true });
  if (process.env.HEARTH_PI_CONFIG) {
    cpSync(process.env.HEARTH_PI_CONFIG, directory, { recursive: true });
  }
  copyFileSync(EXTENSION, join(directory, "extensions", "hearth.ts"));
}

// What Pi is to know of a session, from the parameters that open it; empty when there is nothing.
function sessionOf(params) {
  const servers = Array.isArray(params?.mcpServers) ? params.mcpServers : [];
  const instructions = params?._meta?.["hearth.dev/instructions"] ?? "";
  return servers.length || instructions ? JSON.stringify({ servers, instructions }) : "";
}

class Adapter {
  constructor() {
    this.session = "";
    this.initialize = undefined; // the client's message
    this.greeted = Promise.resolve();
    this.start();
  }

  start() {
    const environment = { ...process.env };
    delete environment[VARIABLE];
    if (this.session) environment[VARIABLE] = this.session;
    const child = spawn(process.env.HEARTH_PI_ACP || "pi-acp", [], {
      stdio: ["pipe", "pipe", "inherit"],
      env: environment,
    });
    this.child = child;
    this.ended = new Promise((resolve) => child.once("close", resolve));
    child.once("error", (error) => {
      console.error(`pi-acp cannot be started: ${error.message}`);
      process.exit(1);
    });
    child.once("close", (code, signal) => {
      if (this.child === child) process.exit(signal ? 1 : (code ?? 1));
    });
    child.stdin.on("error", () => {});
    createInterface({ input: child.stdout, crlfDelay: Infinity }).on("line", (line) => this.heard(line));
  }

  // A line of the adapter's.
  heard(line) {
    let message;
    try {
      message = JSON.parse(line);
    } catch {
      // Passed on as it is: the client sees what is wrong.
    }
    if (message?.id === GREETING && !message.method) {
      this.isGreeted();
      return;
    }
    const capabilities = message?.result?.agentCapabilities;
    if (capabilities && message.id === this.initialize?.id) {
      capabilities.mcpCapabilities = { ...capabilities.mcpCapabilities, http: true };
      capabilities._meta = { ...capabilities._meta, "hearth.dev/instructions": true };
      line = JSON.stringify(message);
    }
    process.stdout.write(`${line}\n`);
  }

  // A line of the client's.
  async take(line) {
    let message;
    try {
      message = JSON.parse(line);
    } catch {
      // The adapter says what it thinks of it.
    }
    if (message?.method === "initialize") this.initialize = message;
    if (OPENING.has(message?.method)) {
      const session = sessionOf(message.params);
      if (Buffer.byteLength(session) > VARIABLE_BYTES) {
        const error = { code: -32602, message: "instructions and MCP servers are too large" };
        process.stdout.write(`${JSON.stringify({ jsonrpc: "2.0", id: message.id, error })}\n`);
        return;
      }
      if (session !== this.session) await this.restart(session);
    }
    this.child.stdin.write(`${line}\n`);
  }

  // Start the adapter anew: it and Pi get what they are to know at their start. It keeps one session at a time, so no
  // other one is lost by this.
  async restart(session) {
    this.session = session;
    const before = this.child;
    const ended = this.ended;
    this.child = undefined;
    before.stdin.end();
    const timer = setTimeout(() => before.kill("SIGKILL"), EXIT_MS);
    await ended;
    clearTimeout(timer);
    this.start();
    if (!this.initialize) return;
    const greeted = new Promise((resolve) => {
      this.isGreeted = resolve;
    });
    this.child.stdin.write(`${JSON.stringify({ ...this.initialize, id: GREETING })}\n`);
    await greeted;
  }
}

configure();
const adapter = new Adapter();
// One after the other: a line waits while the adapter is started anew for the one before it.
let turn = Promise.resolve();
createInterface({ input: process.stdin, crlfDelay: Infinity })
  .on("line", (line) => {
    turn = turn.then(() => adapter.take(line));
  })
  .on("close", () => {
    turn = turn.then(() => adapter.child.stdin.end());
  });
for (const signal of ["SIGTERM", "SIGINT"]) process.on(signal, () => adapter.child?.kill(signal));
