/*
 * vLLM's HTTP API over a simulated engine, for routers that send to such servers: one thread, epoll,
 * one send() for each request and step.
 *
 *     mock --port P [--step-us S] [--decode-us D] [--decoding-us E] [--byte-us B]
 *
 * The engine steps like baton's simulated one: everything that has arrived when a step begins joins
 * it; it takes S, D where anyone decodes, E for each who does, and B for each byte of the bodies
 * that join; at its end everyone in it has one more token. Unlike in that engine, a step takes
 * prompts of any length, and nothing is cached.
 *
 * Answered are /v1/completions and /v1/chat/completions, streamed or not, /v1/models, /health and
 * /version. A request that is to be decoded elsewhere gets transfer parameters as vLLM's NIXL
 * connector gives them; one that comes with such parameters skips its prefill.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { HEAD_MAX_BYTES = 1 << 15 };
enum state { READING, WAITING, JOINED, DECODING };

struct connection {
    int fd;
    enum state state;
    char *in; /* head and body of a request, ended by 0 */
    size_t in_bytes, in_room;
    bool stream, usage, chat, remote_decode;
    int prompt, given, wanted; /* tokens */
    long number;
    double prefill_us;
    struct connection *next; /* among those in the engine */
};

static int epoll_fd, timer_fd;
static double step_us = 1000, decode_us = 8000, decoding_us = 50, byte_us = 1;
static struct connection *engine; /* all that are not READING */
static bool stepping;
static long requests;
static time_t started;

/* ------------------------------------------------------------------ answers */

static void send_all(struct connection *c, const char *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t sent = send(c->fd, data, bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return; /* gone, or a megabyte behind: it will see a stream that breaks off */
        data += sent;
        bytes -= sent;
    }
}

static void answer(struct connection *c, int status, const char *body)
{
    char text[2048];
    int bytes = snprintf(text, sizeof text,
                         "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\n"
                         "Content-Length: %zu\r\n\r\n%s",
                         status, status == 200 ? "OK" : "Not Found", strlen(body), body);
    send_all(c, text, bytes);
}

static int choice(struct connection *c, char *to, size_t room)
{
    const char *finish = c->given == c->wanted ? "\"length\"" : "null";
    if (!c->stream && c->chat)
        return snprintf(to, room,
                        "{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\" word\"},"
                        "\"finish_reason\":\"length\"}");
    if (c->chat)
        return snprintf(to, room,
                        "{\"index\":0,\"delta\":{\"content\":\" word\"},\"logprobs\":null,"
                        "\"finish_reason\":%s}",
                        finish);
    return snprintf(to, room,
                    "{\"index\":0,\"text\":\" word\",\"logprobs\":null,\"finish_reason\":%s,"
                    "\"stop_reason\":null}",
                    finish);
}

static int completion(struct connection *c, const char *choices, bool usage, char *to, size_t room)
{
    char counts[160] = "";
    if (usage)
        snprintf(counts, sizeof counts,
                 ",\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d}",
                 c->prompt, c->prompt + c->given, c->given);
    const char *kind = !c->chat      ? "text_completion"
                       : c->stream ? "chat.completion.chunk"
                                   : "chat.completion";
    return snprintf(to, room,
                    "{\"id\":\"cmpl-%ld\",\"object\":\"%s\",\"created\":%ld,\"model\":\"tiny\","
                    "\"choices\":[%s]%s%s}",
                    c->number, kind, (long)started, choices, counts,
                    c->remote_decode
                        ? ",\"kv_transfer_params\":{\"do_remote_prefill\":true,"
                          "\"do_remote_decode\":false,\"remote_block_ids\":[[1,2,3]],"
                          "\"remote_engine_id\":\"mock\",\"remote_request_id\":\"mock\","
                          "\"remote_host\":\"127.0.0.1\",\"remote_port\":1,\"tp_size\":1}"
                        : "");
}

static size_t chunk(char *to, size_t room, const char *event)
{
    return snprintf(to, room, "%zx\r\ndata: %s\n\n\r\n", strlen(event) + 8, event);
}

static void give_token(struct connection *c)
{
    char text[2048], event[1024], one[256];
    size_t bytes = 0;
    c->given++;
    choice(c, one, sizeof one);
    if (c->stream) {
        if (c->given == 1)
            bytes = sprintf(text, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; "
                                  "charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n");
        completion(c, one, false, event, sizeof event);
        bytes += chunk(text + bytes, sizeof text - bytes, event);
        if (c->given == c->wanted && c->usage) {
            completion(c, "", true, event, sizeof event);
            bytes += chunk(text + bytes, sizeof text - bytes, event);
        }
        if (c->given == c->wanted) {
            bytes += chunk(text + bytes, sizeof text - bytes, "[DONE]");
            bytes += sprintf(text + bytes, "0\r\n\r\n");
        }
        send_all(c, text, bytes);
    } else if (c->given == c->wanted) {
        completion(c, one, true, event, sizeof event);
        answer(c, 200, event);
    }
    c->state = c->given == c->wanted ? READING : DECODING;
}

/* ------------------------------------------------------------------ the engine */

static void begin_step(void)
{
    double us = step_us;
    bool decodes = false;
    stepping = engine != NULL;
    if (!stepping)
        return;
    for (struct connection *c = engine; c; c = c->next) {
        if (c->state == WAITING) {
            c->state = JOINED;
            us += c->prefill_us;
        } else {
            decodes = true;
            us += decoding_us;
        }
    }
    us += decodes ? decode_us : 0;
    struct itimerspec when = {.it_value = {us / 1e6, (long)(us * 1e3) % 1000000000}};
    timerfd_settime(timer_fd, 0, &when, NULL);
}

static void end_step(void)
{
    for (struct connection **at = &engine; *at;) {
        struct connection *c = *at;
        if (c->state != WAITING)
            give_token(c);
        if (c->state == READING)
            *at = c->next;
        else
            at = &c->next;
    }
    begin_step();
}

/* ------------------------------------------------------------------ requests */

/* The number after a key of the body, or `otherwise`. */
static int number_of(const char *body, const char *key, int otherwise)
{
    const char *at = strstr(body, key);
    return at ? atoi(at + strlen(key) + strspn(at + strlen(key), ": ")) : otherwise;
}

static bool is_true(const char *body, const char *key)
{
    const char *at = strstr(body, key);
    return at && strncmp(at + strlen(key) + strspn(at + strlen(key), ": "), "true", 4) == 0;
}

static void generate(struct connection *c, const char *body, bool chat)
{
    c->stream = is_true(body, "\"stream\"");
    c->usage = is_true(body, "\"include_usage\"");
    c->remote_decode = is_true(body, "\"do_remote_decode\"");
    c->chat = chat;
    c->wanted = number_of(body, "\"max_tokens\"", number_of(body, "\"max_completion_tokens\"", 16));
    c->given = 0;
    c->number = requests++;
    c->prefill_us = is_true(body, "\"do_remote_prefill\"") ? 0 : byte_us * strlen(body);
    c->prompt = strlen(body) / 4; /* no tokenizer here: of that order */
    c->state = WAITING;
    c->next = engine;
    engine = c;
    if (!stepping)
        begin_step();
}

/* Whether a request line begins so, and its path ends there. */
static bool asks(const char *line, const char *wanted)
{
    size_t bytes = strlen(wanted);
    return strncmp(line, wanted, bytes) == 0 && strchr(" ?", line[bytes]);
}

static void take(struct connection *c, const char *body)
{
    if (asks(c->in, "POST /v1/completions"))
        generate(c, body, false);
    else if (asks(c->in, "POST /v1/chat/completions"))
        generate(c, body, true);
    else if (asks(c->in, "GET /v1/models"))
        answer(c, 200, "{\"object\":\"list\",\"data\":[{\"id\":\"tiny\",\"object\":\"model\","
                       "\"created\":1,\"owned_by\":\"vllm\",\"root\":\"tiny\",\"max_model_len\":32768}]}");
    else if (asks(c->in, "GET /health"))
        answer(c, 200, "");
    else if (asks(c->in, "GET /version"))
        answer(c, 200, "{\"version\":\"0.33.0\"}");
    else
        answer(c, 404, "{\"detail\":\"Not Found\"}");
}

/* Take the request that is complete, if one is; true when there may be another one. */
static bool take_one(struct connection *c)
{
    char *end = memmem(c->in, c->in_bytes, "\r\n\r\n", 4);
    if (!end || c->state != READING)
        return false;
    *end = 0;
    const char *length = strcasestr(c->in, "\ncontent-length:");
    size_t head = end - c->in + 4, body = length ? strtoul(length + 16, NULL, 10) : 0;
    bool expects = strcasestr(c->in, "\nexpect:") != NULL && c->in_bytes == head;
    *end = '\r';
    if (c->in_bytes < head + body) {
        if (expects)
            send_all(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
        return false;
    }
    char after = c->in[head + body];
    c->in[head + body] = 0;
    take(c, c->in + head);
    c->in[head + body] = after;
    c->in_bytes -= head + body;
    memmove(c->in, c->in + head + body, c->in_bytes + 1);
    return true;
}

static void end(struct connection *c)
{
    for (struct connection **at = &engine; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    close(c->fd);
    free(c->in);
    free(c);
}

static void receive(struct connection *c)
{
    if (c->in_room - c->in_bytes < HEAD_MAX_BYTES)
        c->in = realloc(c->in, c->in_room = 2 * c->in_room + HEAD_MAX_BYTES);
    ssize_t got = recv(c->fd, c->in + c->in_bytes, c->in_room - c->in_bytes - 1, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got <= 0) {
        end(c);
        return;
    }
    c->in_bytes += got;
    c->in[c->in_bytes] = 0;
    while (take_one(c))
        ;
}

static void welcome(int listener)
{
    int on = 1, room = 1 << 20, fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    struct connection *c = calloc(1, sizeof *c);
    c->fd = fd;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

int main(int count, char **words)
{
    static char listening, ticking;
    struct sockaddr_in own = {.sin_family = AF_INET};
    int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    for (int i = 1; i + 1 < count; i += 2) {
        if (strcmp(words[i], "--port") == 0)
            own.sin_port = htons(atoi(words[i + 1]));
        else if (strcmp(words[i], "--step-us") == 0)
            step_us = atof(words[i + 1]);
        else if (strcmp(words[i], "--decode-us") == 0)
            decode_us = atof(words[i + 1]);
        else if (strcmp(words[i], "--decoding-us") == 0)
            decoding_us = atof(words[i + 1]);
        else if (strcmp(words[i], "--byte-us") == 0)
            byte_us = atof(words[i + 1]);
    }
    signal(SIGPIPE, SIG_IGN);
    started = time(NULL);
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&own, sizeof own) != 0 || listen(listener, 1024) != 0) {
        perror("cannot listen");
        return 2;
    }
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &listening}, events[256];
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &event);
    event.data.ptr = &ticking;
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &event);
    for (;;) {
        int ready = epoll_wait(epoll_fd, events, 256, -1);
        bool step = false;
        for (int i = 0; i < ready; i++) {
            if (events[i].data.ptr == &listening)
                welcome(listener);
            else if (events[i].data.ptr == &ticking)
                step = true;
            else
                receive(events[i].data.ptr);
        }
        unsigned long expired;
        if (step && read(timer_fd, &expired, sizeof expired) > 0)
            end_step();
    }
}
