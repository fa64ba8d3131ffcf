// A client of Hearth for Node. It loads the contracts from protos/, so nothing is generated.
import { randomUUID } from "node:crypto";
import { fileURLToPath } from "node:url";
import { setTimeout as sleep } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const PROTOS = fileURLToPath(new URL("../../protos", import.meta.url));
const OPTIONS = { keepCase: true, longs: String, enums: String, oneofs: true, includeDirs: [PROTOS] };
const FILES = ["hearth/session/v1/session_service.proto", "hearth/relay/v1/relay_service.proto"];
const { hearth } = grpc.loadPackageDefinition(loader.loadSync(FILES, OPTIONS));

const CALL_MS = 30_000;
// The server says something at least every 15 s; three times that without a message means a dead connection.
const SILENCE_MS = 45_000;
const FIRST_BACKOFF_MS = 100;
const MAX_BACKOFF_MS = 5_000;
// Codes that say nothing about the request: the connection, the server or its proxy went away.
const RESUMABLE = new Set([grpc.status.UNAVAILABLE, grpc.status.CANCELLED, grpc.status.INTERNAL]);
// A limit of calls or streams, over which many readers get that come back at once: the reason, in the details of the status.
const isOverloaded = (error) => (error.metadata?.get("grpc-status-details-bin") ?? []).some((it) => it.includes("OVERLOADED"));
const CHANNEL = {
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 10_000,
  "grpc.keepalive_permit_without_calls": 1,
  "grpc.initial_reconnect_backoff_ms": 200,
  "grpc.max_reconnect_backoff_ms": 3_000,
};

export const isEnding = (type) => /^execution\.(completed|paused|stopped|failed|lost)$/.test(type);

export class Client {
  // `token` is a string, or a function that tells the one that counts now. `roots` (PEM) switches TLS on;
  // `certificate` and `key` (PEM) are shown to services that ask for one.
  constructor({ pool = "127.0.0.1:7400", relay = "127.0.0.1:7402", token = "", roots, certificate, key } = {}) {
    this.token = token;
    const credentials = roots ? grpc.credentials.createSsl(roots, key, certificate) : grpc.credentials.createInsecure();
    this.sessions = new hearth.session.v1.SessionService(pool, credentials, CHANNEL);
    this.relay = new hearth.relay.v1.RelayService(relay, credentials, CHANNEL);
  }

  close() {
    this.sessions.close();
    this.relay.close();
  }

  // Give the agent a message. After a lost answer repeat it with the same `requestId`: it never runs twice.
  send(session, text, { requestId = randomUUID(), ...more } = {}) {
    return this.call("SendInput", { session, request_id: requestId, content: [{ text: { text } }], ...more });
  }

  // Ask the execution to stop. No other one is ever meant.
  stop(session, executionId, { requestId = randomUUID() } = {}) {
    return this.call("StopExecution", { session, request_id: requestId, execution_id: executionId });
  }

  // Any call of SessionService.
  call(method, request) {
    return new Promise((resolve, reject) => {
      const options = { deadline: Date.now() + CALL_MS };
      const done = (error, answer) => (error ? reject(error) : resolve(answer));
      this.sessions[method](request, this.metadata(), options, done);
    });
  }

  // Everything after a cursor, then live, over reconnects. Only an event moves the cursor, so none is lost and none
  // comes twice. After a reconnect `{ item: "reset" }` says to throw away what frames have built up.
  async *watch(session, { after = {}, signal } = {}) {
    let cursor = after;
    let backoff = FIRST_BACKOFF_MS;
    for (let streams = 0; !signal?.aborted; streams += 1) {
      if (streams > 0) yield { item: "reset", reset: {}, reconnect: true };
      const sent = this.currentToken();
      const call = this.relay.Subscribe({ session, after: cursor }, this.metadata());
      const cancel = () => call.cancel();
      signal?.addEventListener("abort", cancel, { once: true });
      let silence = setTimeout(cancel, SILENCE_MS);
      try {
        for await (const { items } of call) {
          clearTimeout(silence);
          silence = setTimeout(cancel, SILENCE_MS);
          for (const item of items) {
            backoff = FIRST_BACKOFF_MS;
            if (item.item === "event") cursor = item.event.cursor;
            yield item;
          }
        }
      } catch (error) {
        const renewed = error.code === grpc.status.UNAUTHENTICATED && this.currentToken() !== sent;
        if (!RESUMABLE.has(error.code) && !isOverloaded(error) && !renewed) throw error;
      } finally {
        clearTimeout(silence);
        signal?.removeEventListener("abort", cancel);
        // What a cancelled call still reports is of no interest to anybody.
        call.on("error", () => {});
        call.cancel();
      }
      await sleep(backoff * (0.5 + Math.random()));
      backoff = Math.min(backoff * 2, MAX_BACKOFF_MS);
    }
  }

  currentToken() {
    return typeof this.token === "function" ? this.token() : this.token;
  }

  metadata() {
    const metadata = new grpc.Metadata();
    const token = this.currentToken();
    if (token) metadata.set("authorization", `Bearer ${token}`);
    return metadata;
  }
}

// What is visible of a session: events make it, frames fill it in until they come.
export class Transcript {
  entries = new Map();
  outcome = "";
  running = "";
  // Index of the last frame before which some are missing of what is shown here.
  lost = -2;

  apply(item) {
    if (item.item === "event") this.event(item.event.event);
    else if (item.item === "frame") this.frame(item.frame.execution_id, item.frame.frame);
    else if (item.item === "gap") {
      this.lost = Number(item.gap.to);
      this.previews((id, entry) => this.entries.set(id, { ...entry, broken: true }));
    } else if (item.item === "reset") this.dropPreviews();
  }

  // An agent uses an id again in another execution, for something else.
  frame(execution, { frame_index: index, entity_id, body, text_delta: delta }) {
    const id = `${execution} ${entity_id}`;
    const behindGap = Number(index) === this.lost + 1;
    if (body === "text_delta") {
      // What it began with may be in the gap.
      const entry = this.entries.get(id) ?? { kind: "agent", text: "", final: false, broken: behindGap };
      if (!entry.final) this.entries.set(id, { ...entry, text: entry.text + delta.text });
    } else if (behindGap) this.lost += 1;
  }

  event(event) {
    if (event.body === "message_completed") {
      const { message_id, role, content } = event.message_completed;
      const id = `${event.execution_id} ${message_id}`;
      const text = content.map((part) => part.text?.text ?? "").join("");
      this.entries.set(id, { kind: role.replace("ROLE_", "").toLowerCase(), text, final: true, broken: false });
    } else if (event.body === "tool_completed") {
      const { tool_call_id, name, output, error } = event.tool_completed;
      const id = `${event.execution_id} ${tool_call_id}`;
      this.entries.set(id, { kind: "tool", text: output || error, name, final: true, broken: false });
    } else if (event.type === "execution.started") {
      this.running = event.execution_id;
      this.lost = -2;
    } else if (isEnding(event.type)) {
      if (this.running === event.execution_id) this.running = "";
      this.outcome = event.type.slice("execution.".length);
      this.dropPreviews();
    }
  }

  dropPreviews() {
    this.lost = -2;
    this.previews((id) => this.entries.delete(id));
  }

  previews(change) {
    for (const [id, entry] of [...this.entries]) if (!entry.final) change(id, entry);
  }
}
