#include "suffix_store.h"

#include <cmath>
#include <stdexcept>

namespace paceline::suffix {
namespace {

constexpr int64_t kBorder = 4;     // prompt tokens in front of a rollout, as context of its first ones
constexpr size_t kOverhead = 256;  // bytes of a problem's bookkeeping, estimated
constexpr int kAges = 64;          // older rollouts weigh as this old ones

uint64_t hash(const Token* tokens, int64_t count) {
  uint64_t state = 0x9e3779b97f4a7c15u ^ static_cast<uint64_t>(count);
  for (int64_t i = 0; i < count; ++i) {  // splitmix64's mixing
    state += static_cast<uint32_t>(tokens[i]) + 0x9e3779b97f4a7c15u;
    state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
    state = (state ^ state >> 27) * 0x94d049bb133111ebu;
    state ^= state >> 31;
  }
  return state;
}

size_t rollout_bytes(const Rollout& rollout) { return sizeof(Rollout) + rollout.tokens.size() * sizeof(Token); }

}  // namespace

Store::Store(const StoreOptions& options) : options_(options), lives_(options.handles) {
  if (options.handles < 1 || options.window_rollouts < 1 || options.window_rollouts > 4096)
    throw std::invalid_argument("suffix store: handles >= 1 and window_rollouts in 1 .. 4096");
  for (int age = 0; age < kAges; ++age)
    weight_of_age_.push_back(static_cast<float>(std::pow(static_cast<double>(options.epoch_decay), age)));
}

Store::~Store() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (worker_.joinable()) worker_.join();
}

Store::Live& Store::live(int64_t handle) {
  if (handle < 0 || handle >= options_.handles) throw std::out_of_range("suffix store: handle out of range");
  return lives_[handle];
}

Store::ProblemPtr& Store::touch(uint64_t key) {
  ProblemPtr& problem = problems_[key];
  if (!problem) {
    problem = std::make_shared<Problem>();
    problem->key = key;
    recent_.push_front(key);
    problem->recency = recent_.begin();
    account(*problem);
  } else {
    recent_.splice(recent_.begin(), recent_, problem->recency);
  }
  return problem;
}

void Store::forget_if_unused(const ProblemPtr& problem) {
  if (problem->running || problem->window || !problem->pending.empty() || problem->merging) return;
  auto found = problems_.find(problem->key);
  if (found == problems_.end() || found->second != problem) return;
  bytes_ -= problem->bytes;
  recent_.erase(problem->recency);
  problems_.erase(found);
}

void Store::begin(int64_t handle, const Token* prompt, int64_t tokens) {
  uint64_t key = hash(prompt, tokens);
  std::lock_guard<std::mutex> lock(mutex_);
  Live& request = live(handle);
  if (request.problem) throw std::invalid_argument("suffix store: begin of a handle that has a request");
  request.problem = touch(key);
  ++request.problem->running;
  request.text.clear();
  request.text.append(prompt, tokens);
  request.prompt_tokens = tokens;
}

void Store::finish(int64_t handle, bool keep, int64_t version) {
  std::lock_guard<std::mutex> lock(mutex_);
  Live& request = live(handle);
  if (!request.problem) throw std::invalid_argument("suffix store: finish of a handle without a request");
  ProblemPtr problem = std::move(request.problem);
  request.problem = nullptr;
  --problem->running;
  if (keep) publish(problem, request.text.data(), request.prompt_tokens, request.text.size(), version);
  forget_if_unused(problem);
}

void Store::publish(const Token* prompt, int64_t prompt_tokens, const Token* response, int64_t tokens,
                    int64_t version) {
  uint64_t key = hash(prompt, prompt_tokens);
  std::vector<Token> text(prompt, prompt + prompt_tokens);
  text.insert(text.end(), response, response + tokens);
  std::lock_guard<std::mutex> lock(mutex_);
  ProblemPtr problem = touch(key);
  publish(problem, text.data(), prompt_tokens, static_cast<int64_t>(text.size()), version);
  forget_if_unused(problem);
}

void Store::publish(const ProblemPtr& problem, const Token* text, int64_t prompt_tokens, int64_t tokens,
                    int64_t version) {
  int64_t border = std::min(prompt_tokens, kBorder), first = prompt_tokens - border;
  int64_t size = std::min(tokens - first, Window::place_tokens(options_.window_rollouts));
  if (size <= border) return;
  auto rollout = std::make_shared<Rollout>(Rollout{{text + first, text + first + size},
                                                   static_cast<uint32_t>(border), version, sequence_++});
  Problem& p = *problem;
  p.pending.push_back(std::move(rollout));
  if (static_cast<int64_t>(p.pending.size()) > options_.window_rollouts) p.pending.erase(p.pending.begin());
  account(p);
  if (p.tokens > options_.inline_tokens) merge_later(problem);
  make_room();
}

void Store::append(int64_t requests, const int64_t* handles, const Token* tokens, const int64_t* offsets) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t r = 0; r < requests; ++r) {
    Live& request = live(handles[r]);
    if (!request.problem) throw std::invalid_argument("suffix store: append to a handle without a request");
    if (offsets[r + 1] < offsets[r]) throw std::invalid_argument("suffix store: offsets descend");
    request.text.append(tokens + offsets[r], offsets[r + 1] - offsets[r]);
    request.text.index();
  }
}

void Store::catch_up(int64_t requests, const int64_t* handles, const Token* history, int64_t stride,
                     const int64_t* lengths) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t r = 0; r < requests; ++r) {
    Live& request = live(handles[r]);
    int64_t known = request.text.size();
    if (!request.problem) throw std::invalid_argument("suffix store: a history of a handle without a request");
    if (lengths[r] < known) throw std::invalid_argument("suffix store: a history became shorter");
    request.text.append(history + handles[r] * stride + known, lengths[r] - known);
  }
}

void Store::draft(const DraftRows& rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t r = 0; r < rows.requests; ++r) {
    Live& request = live(rows.handles[r]);
    if (!request.problem) throw std::invalid_argument("suffix store: draft for a handle without a request");
    Problem& problem = *request.problem;
    if (!problem.pending.empty() && !problem.merging && problem.tokens <= options_.inline_tokens) {
      merge_now(problem);
      make_room();
    }
    request.text.index();
    DraftShape shape = rows.shape;
    shape.nodes = static_cast<int>(std::clamp<int64_t>(rows.room[r], 0, shape.nodes));
    shape.depth = std::min(shape.depth, shape.nodes);
    Candidate own[kOwnCandidates], window[kWindowCandidates], both[kCandidates];
    int n = request.text.find(options_.own_weight, own), m = 0;
    if (problem.window) m = problem.window->find(request.text.context(), version_, weight_of_age_, window);
    std::merge(own, own + n, window, window + m, both,
               [](const Candidate& a, const Candidate& b) { return a.length > b.length; });
    DraftOut out{rows.tokens + r * rows.shape.nodes, rows.parents + r * rows.shape.nodes,
                 rows.probs ? rows.probs + r * rows.shape.nodes : nullptr};
    rows.counts[r] = suffix::draft(both, n + m, shape, out);
  }
}

void Store::set_version(int64_t version) {
  std::lock_guard<std::mutex> lock(mutex_);
  version_ = version;
}

std::vector<RolloutPtr> Store::kept(const Window* window, const std::vector<RolloutPtr>& pending) const {
  std::vector<RolloutPtr> all;
  if (window)
    for (const RolloutPtr& rollout : window->by_slot())
      if (rollout) all.push_back(rollout);
  all.insert(all.end(), pending.begin(), pending.end());
  std::sort(all.begin(), all.end(), [](const RolloutPtr& a, const RolloutPtr& b) { return a->sequence > b->sequence; });
  size_t count = 0, bytes = kOverhead;
  for (; count < std::min<size_t>(all.size(), options_.window_rollouts); ++count) {
    bytes += rollout_bytes(*all[count]) + all[count]->tokens.size() * 11 / 2;  // order, lengths, separators
    if (bytes > options_.max_bytes) break;
  }
  all.resize(count);
  return all;
}

// A problem's merges are made by whoever holds the lock (small windows), or one after the other by the worker.
void Store::merge_now(Problem& problem) {
  auto merged = Window::merged(problem.window.get(), kept(problem.window.get(), problem.pending),
                               options_.window_rollouts);
  problem.window = std::move(merged);
  problem.pending.clear();
  account(problem);
}

void Store::merge_later(const ProblemPtr& problem) {
  if (problem->merging) return;  // the worker looks again when it is done
  problem->merging = true;
  jobs_.push_back(problem);
  if (!worker_.joinable()) worker_ = std::thread(&Store::work, this);
  wake_.notify_one();
}

void Store::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    ProblemPtr problem = jobs_.front();
    jobs_.pop_front();
    busy_ = true;
    while (!problem->pending.empty() && !stop_) {
      std::shared_ptr<const Window> before = problem->window;
      std::vector<RolloutPtr> pending = problem->pending, keep = kept(before.get(), pending);
      uint64_t generation = problem->generation;
      lock.unlock();
      std::shared_ptr<const Window> after = Window::merged(before.get(), keep, options_.window_rollouts);
      lock.lock();
      if (problem->generation != generation) continue;  // evicted meanwhile
      // Drafts in flight are none: they hold the lock. Those that follow see the new window.
      problem->window.swap(after);
      uint64_t last = pending.back()->sequence;
      auto& rest = problem->pending;
      rest.erase(rest.begin(), std::find_if(rest.begin(), rest.end(),
                                            [last](const RolloutPtr& rollout) { return rollout->sequence > last; }));
      account(*problem);
      lock.unlock();
      before.reset(), after.reset(), keep.clear(), pending.clear();  // freed without the lock
      lock.lock();
    }
    problem->merging = false;
    forget_if_unused(problem);
    make_room();
    busy_ = false;
    idle_.notify_all();
  }
}

void Store::flush() {
  std::unique_lock<std::mutex> lock(mutex_);
  merge_all(lock);
}

void Store::merge_all(std::unique_lock<std::mutex>& lock) {
  idle_.wait(lock, [this] { return jobs_.empty() && !busy_; });
  for (auto& [key, problem] : problems_)
    if (!problem->pending.empty()) merge_now(*problem);
  make_room();
}

void Store::account(Problem& problem) {
  size_t bytes = kOverhead;
  problem.tokens = 0;
  if (problem.window) bytes += problem.window->bytes(), problem.tokens += problem.window->order().size();
  for (const RolloutPtr& rollout : problem.pending)
    bytes += rollout_bytes(*rollout), problem.tokens += rollout->tokens.size();
  bytes_ += bytes - problem.bytes;
  problem.bytes = bytes;
}

// Problems leave from the least recently used on; those with running requests only when nothing else is left.
void Store::make_room() {
  for (bool running : {false, true}) {
    for (auto at = recent_.end(); bytes_ > options_.max_bytes && at != recent_.begin();) {
      auto older = at--;
      ProblemPtr problem = problems_.at(*at);
      if ((problem->running > 0) != running || problem->bytes <= kOverhead) continue;
      evict(problem);  // may remove `at`
      at = older;
    }
  }
}

void Store::evict(const ProblemPtr& problem) {
  problem->window = nullptr;
  problem->pending.clear();
  ++problem->generation;
  account(*problem);
  forget_if_unused(problem);
}

size_t Store::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

size_t Store::live_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t bytes = 0;
  for (const Live& request : lives_) bytes += request.text.bytes();
  return bytes;
}

size_t Store::problems() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return problems_.size();
}

size_t Store::window_tokens() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t tokens = 0;
  for (const auto& [key, problem] : problems_)
    if (problem->window) tokens += problem->window->order().size();
  return tokens;
}

}  // namespace paceline::suffix
