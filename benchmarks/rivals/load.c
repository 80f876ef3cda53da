/*
 * A load on one endpoint: so many streamed completions at a time, each sent when the one before it
 * on the same connection has ended; a time for each token event. One thread, epoll, HTTP/1.1 with
 * kept-alive connections.
 *
 *     load --port P --streams N --requests R --bodies FILE [--path /v1/completions]
 *          [--ramp-ms M] [--limit-s S] [--quickack]
 *
 * FILE holds one JSON body per line; request i sends line i modulo their number. The first requests
 * are spread evenly over M ms, so that streams do not run in step. With --quickack received bytes
 * are acknowledged at once, which hides from a server that leaves Nagle's algorithm on what that
 * costs ordinary clients. TCP_NODELAY is always set.
 *
 * Prints one JSON object: wall_s, own_cpu_s, failed, problems (the first few), and one entry per
 * complete request in ttft_s, gap_max_s (0 where one event came), took_s, events (token events: those
 * with a choice) and tokens (as the server's usage tells, -1 where it told none).
 * Exit status 0 also where requests failed; 2 where there was no load at all.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 1 << 16, READ_BYTES = 1 << 18, PROBLEMS = 5, HEAD_BYTES = 512 };

/* What the bytes that come next are. A body without chunks ends by its length, or by the close. */
enum part { STATUS, HEADER, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, PLAIN, COMPLETE };

struct request { /* all times in seconds on the monotonic clock */
    double sent, first, last, gap_max, ended;
    int events, tokens;
    bool done; /* data: [DONE] was seen */
};

struct connection {
    int fd;
    bool busy;
    enum part part;
    bool chunked, ok;
    bool closing; /* the server said that it will close */
    long left; /* bytes of this chunk, or of a body without chunks; -1: until the close */
    double due; /* when its first request is sent */
    int current; /* number of the request under way */
    const char *out;
    size_t out_bytes;
    char head[HEAD_BYTES];
    size_t head_bytes; /* of the request's head that is sent before `out` */
    char *line; /* of the response's head, of a chunk's size, or of an event */
    size_t line_bytes;
    char *event; /* a line of an event, which may span chunks */
    size_t event_bytes;
};

static struct {
    int port, streams, requests, ramp_ms, limit_s;
    bool quickack;
    const char *path, *bodies;
} options = {.ramp_ms = 0, .limit_s = 120, .path = "/v1/completions"};

static struct request *requests;
static const char **bodies;
static size_t *body_bytes, body_count;
static int next_request, ended_requests, failed;
static char problems[PROBLEMS][200];
static int epoll_fd;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(2);
}

/* ------------------------------------------------------------------ sending */

static void watch(struct connection *c, int operation, unsigned events)
{
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(epoll_fd, operation, c->fd, &event) != 0)
        die("epoll_ctl: %s", strerror(errno));
}

static void dial(struct connection *c)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(options.port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int on = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&to, sizeof to) != 0)
        die("cannot connect to port %d: %s", options.port, strerror(errno));
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    watch(c, EPOLL_CTL_ADD, EPOLLIN);
}

/* Another connection in place of this one, where anything is left to be sent. */
static void redial(struct connection *c)
{
    close(c->fd);
    if (next_request < options.requests)
        dial(c);
}

static void acknowledge(struct connection *c)
{
    int on = 1;
    if (options.quickack)
        setsockopt(c->fd, IPPROTO_TCP, TCP_QUICKACK, &on, sizeof on);
}

/* Write what is left of the request; the rest when there is room. */
static void push(struct connection *c)
{
    while (c->head_bytes + c->out_bytes > 0) {
        bool head = c->head_bytes > 0;
        const char *from = head ? c->head + strlen(c->head) - c->head_bytes : c->out;
        /* MSG_MORE: head and body leave together. */
        ssize_t sent = send(c->fd, from, head ? c->head_bytes : c->out_bytes,
                            MSG_NOSIGNAL | (head ? MSG_MORE : 0));
        if (sent < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (sent < 0)
            return; /* the reader sees the same */
        if (head) {
            c->head_bytes -= sent;
        } else {
            c->out += sent;
            c->out_bytes -= sent;
        }
    }
    watch(c, EPOLL_CTL_MOD, c->head_bytes + c->out_bytes > 0 ? EPOLLIN | EPOLLOUT : EPOLLIN);
    acknowledge(c);
}

static void send_next(struct connection *c)
{
    c->busy = false;
    if (next_request >= options.requests)
        return;
    c->busy = true;
    c->current = next_request++;
    c->part = STATUS;
    c->line_bytes = c->event_bytes = 0;
    c->out = bodies[c->current % body_count];
    c->out_bytes = body_bytes[c->current % body_count];
    c->head_bytes = snprintf(c->head, sizeof c->head,
                             "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                             "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
                             options.path, options.port, c->out_bytes);
    requests[c->current] = (struct request){.sent = now(), .tokens = -1};
    push(c);
}

/* ------------------------------------------------------------------ receiving */

static void give_up(struct connection *c, const char *format, ...)
{
    if (failed < PROBLEMS) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(problems[failed], sizeof problems[0], format, arguments);
        va_end(arguments);
    }
    failed++;
    ended_requests++;
    requests[c->current].events = 0;
    redial(c);
    send_next(c);
}

/* One line of server-sent events, without its end. */
static void take_line(struct request *r, char *line, double at)
{
    if (strncmp(line, "data:", 5) != 0)
        return;
    if (strstr(line, "[DONE]")) {
        r->done = true;
        return;
    }
    char *choices = strstr(line, "\"choices\":");
    char *usage = strstr(line, "\"completion_tokens\":");
    if (usage)
        r->tokens = atoi(usage + strlen("\"completion_tokens\":"));
    if (!choices)
        return;
    choices += strlen("\"choices\":");
    choices += strspn(choices, " [");
    if (*choices != '{')
        return; /* the event with the usage has no choice */
    if (r->events++ == 0)
        r->first = at;
    else if (at - r->last > r->gap_max)
        r->gap_max = at - r->last;
    r->last = at;
}

static void take_body(struct connection *c, const char *data, size_t bytes, double at)
{
    for (size_t i = 0; i < bytes; i++) {
        if (data[i] != '\n') {
            if (c->event_bytes < LINE_MAX_BYTES - 1)
                c->event[c->event_bytes++] = data[i];
            continue;
        }
        c->event[c->event_bytes] = 0;
        take_line(&requests[c->current], c->event, at);
        c->event_bytes = 0;
    }
}

/* One line of the response's framing; returns what comes after it. */
static enum part framing(struct connection *c)
{
    switch (c->part) {
    case STATUS:
        c->ok = strncmp(c->line, "HTTP/1.1 200", 12) == 0;
        c->chunked = c->closing = false;
        c->left = -1;
        return HEADER;
    case HEADER:
        if (c->line_bytes == 0)
            return c->chunked ? CHUNK_SIZE : c->left == 0 ? COMPLETE : PLAIN;
        if (strncasecmp(c->line, "transfer-encoding:", 18) == 0)
            c->chunked = strcasestr(c->line, "chunked") != NULL;
        if (strncasecmp(c->line, "content-length:", 15) == 0)
            c->left = atol(c->line + 15);
        if (strncasecmp(c->line, "connection:", 11) == 0)
            c->closing = strcasestr(c->line, "close") != NULL;
        return HEADER;
    case CHUNK_SIZE:
        c->left = strtol(c->line, NULL, 16);
        return c->left > 0 ? CHUNK_DATA : TRAILER;
    case CHUNK_END:
        return CHUNK_SIZE;
    default: /* TRAILER */
        return c->line_bytes == 0 ? COMPLETE : TRAILER;
    }
}

static size_t take_some(struct connection *c, const char *data, size_t bytes, double at)
{
    if (c->part == CHUNK_DATA || c->part == PLAIN) {
        size_t take = c->left >= 0 && (size_t)c->left < bytes ? (size_t)c->left : bytes;
        take_body(c, data, take, at);
        if (c->left >= 0 && (c->left -= take) == 0)
            c->part = c->part == PLAIN ? COMPLETE : CHUNK_END;
        return take;
    }
    const char *end = memchr(data, '\n', bytes);
    size_t take = end ? (size_t)(end - data) : bytes;
    size_t room = LINE_MAX_BYTES - 1 - c->line_bytes;
    memcpy(c->line + c->line_bytes, data, take < room ? take : room);
    c->line_bytes += take < room ? take : room;
    if (!end)
        return take;
    if (c->line_bytes > 0 && c->line[c->line_bytes - 1] == '\r')
        c->line_bytes--;
    c->line[c->line_bytes] = 0;
    c->part = framing(c);
    c->line_bytes = 0;
    return take + 1;
}

static void complete(struct connection *c, double at)
{
    struct request *r = &requests[c->current];
    c->event[c->event_bytes] = 0;
    if (!c->ok || r->events == 0 || !r->done) {
        give_up(c, "%s, %d token events, %s: %.120s", c->ok ? "200" : "not 200", r->events,
                r->done ? "ended" : "not ended", c->event);
        return;
    }
    r->ended = at;
    ended_requests++;
    if (c->closing)
        redial(c);
    send_next(c);
}

static void receive(struct connection *c)
{
    static char buffer[READ_BYTES];
    ssize_t got = recv(c->fd, buffer, sizeof buffer, 0);
    double at = now();
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got <= 0 && !c->busy) { /* closed before its first request */
        redial(c);
        return;
    }
    if (got <= 0 && c->part == PLAIN && c->left < 0) {
        c->closing = true;
        complete(c, at);
        return;
    }
    if (got <= 0) {
        give_up(c, "the connection was lost after %d token events", requests[c->current].events);
        return;
    }
    acknowledge(c);
    for (size_t done = 0; done < (size_t)got && c->busy;) {
        done += take_some(c, buffer + done, got - done, at);
        if (c->part == COMPLETE) {
            complete(c, at);
            return; /* nothing is asked ahead, so nothing more can have come */
        }
    }
}

/* ------------------------------------------------------------------ running */

/* How long until a connection's first request is due, in ms; -1 where all have begun. */
static int begin_due(struct connection *connections, int *begun)
{
    while (*begun < options.streams) {
        double wait = connections[*begun].due - now();
        if (wait > 0)
            return (int)(wait * 1000) + 1;
        send_next(&connections[(*begun)++]);
    }
    return -1;
}

static double run(void)
{
    struct connection *connections = calloc(options.streams, sizeof *connections);
    struct epoll_event events[256];
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < options.streams; i++) {
        connections[i].line = malloc(LINE_MAX_BYTES);
        connections[i].event = malloc(LINE_MAX_BYTES);
        dial(&connections[i]);
    }
    double began = now(), until = began + options.limit_s;
    for (int i = 0; i < options.streams; i++)
        connections[i].due = began + options.ramp_ms * 1e-3 * i / options.streams;
    int begun = 0;
    while (ended_requests < options.requests) {
        if (now() > until)
            die("%d of %d requests had ended after %d s", ended_requests, options.requests,
                options.limit_s);
        int wait = begin_due(connections, &begun);
        int ready = epoll_wait(epoll_fd, events, 256, wait < 0 || wait > 100 ? 100 : wait);
        for (int i = 0; i < ready; i++) {
            struct connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT)
                push(c);
            if (events[i].events & ~EPOLLOUT)
                receive(c);
        }
    }
    return now() - began;
}

static void read_bodies(void)
{
    FILE *file = fopen(options.bodies, "r");
    if (!file)
        die("cannot read %s: %s", options.bodies, strerror(errno));
    char *line = NULL;
    size_t room = 0;
    for (ssize_t bytes; (bytes = getline(&line, &room, file)) > 1; line = NULL, room = 0) {
        bodies = realloc(bodies, (body_count + 1) * sizeof *bodies);
        body_bytes = realloc(body_bytes, (body_count + 1) * sizeof *body_bytes);
        bodies[body_count] = line;
        body_bytes[body_count++] = line[bytes - 1] == '\n' ? bytes - 1 : bytes;
    }
    fclose(file);
    if (body_count == 0)
        die("%s has no bodies", options.bodies);
}

static void print_text(const char *text)
{
    putchar('"');
    for (; *text; text++)
        if (*text == '"' || *text == '\\')
            printf("\\%c", *text);
        else
            putchar((unsigned char)*text < ' ' ? ' ' : *text);
    putchar('"');
}

enum column { TTFT, GAP_MAX, TOOK, EVENTS, TOKENS };

static void print_column(const char *name, enum column column)
{
    const char *between = "";
    printf(", \"%s\": [", name);
    for (int i = 0; i < options.requests; i++) {
        struct request *r = &requests[i];
        if (r->ended == 0)
            continue;
        double values[] = {r->first - r->sent, r->gap_max, r->ended - r->sent, r->events, r->tokens};
        printf("%s%.*f", between, column >= EVENTS ? 0 : 6, values[column]);
        between = ", ";
    }
    printf("]");
}

static void print_all(double wall)
{
    struct rusage own;
    getrusage(RUSAGE_SELF, &own);
    double cpu = own.ru_utime.tv_sec + own.ru_stime.tv_sec;
    cpu += (own.ru_utime.tv_usec + own.ru_stime.tv_usec) * 1e-6;
    printf("{\"wall_s\": %.6f, \"own_cpu_s\": %.6f, \"failed\": %d, \"problems\": [", wall, cpu, failed);
    for (int i = 0; i < failed && i < PROBLEMS; i++) {
        fputs(i ? ", " : "", stdout);
        print_text(problems[i]);
    }
    printf("]");
    print_column("ttft_s", TTFT);
    print_column("gap_max_s", GAP_MAX);
    print_column("took_s", TOOK);
    print_column("events", EVENTS);
    print_column("tokens", TOKENS);
    puts("}");
}

int main(int count, char **words)
{
    for (int i = 1; i < count; i++) {
        const char *word = words[i], *value = i + 1 < count ? words[i + 1] : "";
        if (strcmp(word, "--quickack") == 0) {
            options.quickack = true;
            continue;
        }
        i++;
        if (strcmp(word, "--port") == 0)
            options.port = atoi(value);
        else if (strcmp(word, "--streams") == 0)
            options.streams = atoi(value);
        else if (strcmp(word, "--requests") == 0)
            options.requests = atoi(value);
        else if (strcmp(word, "--bodies") == 0)
            options.bodies = value;
        else if (strcmp(word, "--path") == 0)
            options.path = value;
        else if (strcmp(word, "--ramp-ms") == 0)
            options.ramp_ms = atoi(value);
        else if (strcmp(word, "--limit-s") == 0)
            options.limit_s = atoi(value);
        else
            die("unknown argument %s", word);
    }
    if (options.port <= 0 || options.streams <= 0 || options.requests <= 0 || !options.bodies)
        die("expected: --port P --streams N --requests R --bodies FILE");
    read_bodies();
    requests = calloc(options.requests, sizeof *requests);
    print_all(run());
    return 0;
}
