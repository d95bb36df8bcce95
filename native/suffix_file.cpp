// The file of a suffix store: header, every text once, then the sorted places of the windows and of the pool, so that
// loading needs no sort.
//
// Little endian: magic, format, zero, payload bytes, checksum of the payload; the payload as `save` writes it.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

#include "suffix_store.h"

namespace paceline::suffix {
namespace {

constexpr char kMagic[8] = {'P', 'A', 'C', 'E', 'S', 'U', 'F', 'X'};
constexpr uint32_t kFormat = 2;
constexpr char kDamaged[] = "damaged; delete it (the index fills again by itself)";

struct Header {
  char magic[8];
  uint32_t format, zero;
  uint64_t payload_bytes, checksum;
};

struct RolloutHead {
  uint64_t tokens, sequence;
  int64_t version;
  uint64_t border;
};

class Checksum {  // of parts: data written in one piece is read in one
 public:
  void add(const void* data, size_t bytes) {
    const char* at = static_cast<const char*>(data);
    for (; bytes >= 8; at += 8, bytes -= 8) {
      uint64_t word;
      std::memcpy(&word, at, 8);
      mix(word);
    }
    uint64_t word = bytes;
    if (bytes) std::memcpy(reinterpret_cast<char*>(&word) + 1, at, bytes);
    mix(word);
  }
  uint64_t value() const { return state_; }

 private:
  void mix(uint64_t word) {
    state_ = (state_ ^ word) * 0x9fb21c651e98df25u;
    state_ ^= state_ >> 29;
  }
  uint64_t state_ = 0x243f6a8885a308d3u;
};

class File {
 public:
  File(const std::string& path, const char* mode) : path_(path), file_(std::fopen(path.c_str(), mode)) {
    if (!file_) fail(std::strerror(errno));
  }
  ~File() {
    if (file_) std::fclose(file_);
  }
  File(const File&) = delete;
  [[noreturn]] void fail(const std::string& what) const { throw std::runtime_error(path_ + ": " + what); }

  void write(const void* data, size_t bytes) {
    checksum_.add(data, bytes), count_ += bytes;
    if (bytes && std::fwrite(data, 1, bytes, file_) != bytes) fail(std::strerror(errno));
  }
  template <typename T>
  void put(const T& value) {
    write(&value, sizeof(T));
  }
  void close(const Header& header) {
    bool fine = std::fseek(file_, 0, SEEK_SET) == 0 && std::fwrite(&header, sizeof(header), 1, file_) == 1 &&
                std::fflush(file_) == 0 && fsync(fileno(file_)) == 0;
    int error = errno;
    fine = std::fclose(std::exchange(file_, nullptr)) == 0 && fine;
    if (!fine) fail(std::strerror(error));
  }

  void expect(uint64_t bytes) { left_ = bytes; }
  void read(void* data, size_t bytes) {
    if (bytes > left_ || (bytes && std::fread(data, 1, bytes, file_) != bytes))
      fail("shorter than it says; delete it (the index fills again by itself)");
    checksum_.add(data, bytes), left_ -= bytes;
  }
  template <typename T>
  T get() {
    T value;
    read(&value, sizeof(T));
    return value;
  }
  template <typename T>
  std::vector<T> array(uint64_t size) {
    if (size > left_ / sizeof(T)) fail(kDamaged);
    std::vector<T> values(size);
    read(values.data(), size * sizeof(T));
    return values;
  }

  void restart() { checksum_ = Checksum(), count_ = 0; }
  uint64_t count() const { return count_; }
  uint64_t left() const { return left_; }
  uint64_t checksum() const { return checksum_.value(); }

 private:
  std::string path_;
  std::FILE* file_;
  Checksum checksum_;
  uint64_t count_ = 0, left_ = 0;
};

}  // namespace

void Store::save(const std::string& path) {
  std::vector<std::pair<uint64_t, std::shared_ptr<const Window>>> windows;  // least recently used first; then the pool
  int64_t version;
  uint64_t sequence;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    merge_all(lock);
    for (auto key = recent_.rbegin(); key != recent_.rend(); ++key)
      if (const auto& window = problems_.at(*key)->window) windows.emplace_back(*key, window);
    windows.emplace_back(0, pool_->window ? pool_->window : std::make_shared<Window>());
    version = version_, sequence = sequence_;
  }
  std::map<uint64_t, std::pair<uint64_t, RolloutPtr>> texts;  // by sequence: number in the file
  for (const auto& [key, window] : windows)
    for (const RolloutPtr& rollout : window->rollouts()) texts[rollout->sequence].second = rollout;
  std::string partial = path + "." + std::to_string(getpid()) + ".partial";
  try {
    File file(partial, "wb");
    Header header{{}, kFormat, 0, 0, 0};
    std::memcpy(header.magic, kMagic, sizeof(kMagic));
    file.put(header);
    file.restart();
    file.put(version);
    file.put(sequence);
    file.put<uint64_t>(texts.size());
    uint64_t number = 0;
    for (auto& [order, text] : texts) {
      const Rollout& rollout = *text.second;
      text.first = number++;
      file.put(RolloutHead{rollout.tokens.size(), rollout.sequence, rollout.version, rollout.border});
      file.write(rollout.tokens.data(), rollout.tokens.size() * sizeof(Token));
    }
    file.put<uint64_t>(windows.size());
    for (const auto& [key, window] : windows) {
      file.put(key);
      file.put<uint64_t>(window->rollouts().size());
      std::vector<uint64_t> numbers;
      for (const RolloutPtr& rollout : window->rollouts()) numbers.push_back(texts.at(rollout->sequence).first);
      file.write(numbers.data(), numbers.size() * sizeof(uint64_t));
      file.put<uint64_t>(window->order().size());
      file.write(window->order().data(), window->order().size() * sizeof(uint32_t));
      file.write(window->shared().data(), window->shared().size());
    }
    header.payload_bytes = file.count(), header.checksum = file.checksum();
    file.close(header);
  } catch (...) {
    std::remove(partial.c_str());
    throw;
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) {
    std::string what = path + ": " + std::strerror(errno);
    std::remove(partial.c_str());
    throw std::runtime_error(what);
  }
}

void Store::load(const std::string& path) {
  File file(path, "rb");
  file.expect(sizeof(Header));
  Header header = file.get<Header>();
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) file.fail("not a suffix index");
  if (header.format != kFormat)
    file.fail("format " + std::to_string(header.format) + ", this build reads format " + std::to_string(kFormat) +
              " (the index fills again by itself)");
  if (header.zero) file.fail(kDamaged);
  file.restart();
  file.expect(header.payload_bytes);
  int64_t version = file.get<int64_t>();
  uint64_t sequence = file.get<uint64_t>(), count = file.get<uint64_t>();
  std::vector<RolloutPtr> texts;
  for (uint64_t i = 0; i < count; ++i) {
    RolloutHead head = file.get<RolloutHead>();
    bool fits = head.tokens > head.border && head.sequence < sequence &&
                (texts.empty() || texts.back()->sequence < head.sequence);
    if (!fits) file.fail(kDamaged);
    texts.push_back(std::make_shared<Rollout>(
        Rollout{file.array<Token>(head.tokens), static_cast<uint32_t>(head.border), head.version, head.sequence}));
  }
  struct Stored {
    uint64_t key;
    std::vector<RolloutPtr> rollouts;
    std::vector<uint32_t> order;
    std::vector<uint8_t> shared;
  };
  std::vector<Stored> stored;
  count = file.get<uint64_t>();
  for (uint64_t i = 0; i < count; ++i) {
    Stored window{file.get<uint64_t>(), {}, {}, {}};
    for (uint64_t number : file.array<uint64_t>(file.get<uint64_t>())) {
      if (number >= texts.size()) file.fail(kDamaged);
      window.rollouts.push_back(texts[number]);
    }
    uint64_t places = file.get<uint64_t>();
    window.order = file.array<uint32_t>(places);
    window.shared = file.array<uint8_t>(places);
    stored.push_back(std::move(window));
  }
  if (file.left() || file.checksum() != header.checksum || stored.empty())
    file.fail("damaged (checksum); delete it (the index fills again by itself)");

  std::vector<std::shared_ptr<const Window>> windows;
  for (Stored& window : stored) {
    try {
      windows.push_back(
          Window::restored(std::move(window.rollouts), std::move(window.order), std::move(window.shared)));
    } catch (const std::invalid_argument& error) {
      file.fail(error.what());
    }
  }
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return jobs_.empty() && !busy_; });
  std::vector<ProblemPtr> before;
  for (auto& [key, problem] : problems_) before.push_back(problem);
  for (const ProblemPtr& problem : before) evict(problem);
  evict(pool_);
  for (size_t i = 0; i < windows.size(); ++i) {
    ProblemPtr problem = i + 1 < windows.size() ? touch(stored[i].key) : pool_;
    problem->window = std::move(windows[i]);
    account(*problem);
    if (problem->bytes > problem->limit) merge_now(*problem, problem->limit);  // the newest stay
  }
  version_ = version, sequence_ = std::max(sequence_, sequence);
  make_room();
}

}  // namespace paceline::suffix
