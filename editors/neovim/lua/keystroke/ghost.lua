-- Ghost text: requested at every key, shortened while it is typed, accepted whole, by word or by line.
--
-- At most one suggestion is shown, at the cursor. An answer for another position is dropped.

local keystroke = require('keystroke')

local M = {}
local space = vim.api.nvim_create_namespace('keystroke_ghost')
local shown -- { buffer, row, column, text, to_row, to_column, item, taken }
local waiting -- the request under way

local function cursor()
  local place = vim.api.nvim_win_get_cursor(0)
  return place[1] - 1, place[2]
end

local function erase()
  if shown and vim.api.nvim_buf_is_valid(shown.buffer) then
    vim.api.nvim_buf_clear_namespace(shown.buffer, space, 0, -1)
  end
end

local function draw()
  erase()
  local lines = vim.split(shown.text, '\n', { plain = true })
  local more = {}
  for number = 2, #lines do
    more[#more + 1] = { { lines[number] == '' and ' ' or lines[number], 'KeystrokeGhost' } }
  end
  vim.api.nvim_buf_set_extmark(shown.buffer, space, shown.row, shown.column, {
    virt_text = { { lines[1], 'KeystrokeGhost' } },
    virt_text_pos = 'inline',
    virt_lines = #more > 0 and more or nil,
    hl_mode = 'combine',
  })
end

function M.visible() return shown ~= nil and shown.buffer == vim.api.nvim_get_current_buf() end

--- The visible suggestion, for tests and status lines.
function M.text() return M.visible() and shown.text or '' end

function M.clear()
  erase()
  shown = nil
end

local function show(buffer, item)
  local row, column = cursor()
  local range = item.range
  local text = item.insertText
  if type(text) == 'table' then
    text = text.value
  end
  local to_row, to_column = row, column
  if range then
    if range.start.line ~= row or range.start.character > column then
      return
    end
    local typed = vim.api.nvim_get_current_line():sub(range.start.character + 1, column)
    if text:sub(1, #typed) ~= typed then
      return
    end
    text = text:sub(#typed + 1)
    to_row, to_column = range['end'].line, range['end'].character
    if to_row == row and to_column < column then
      to_column = column
    end
  end
  if text == '' then
    return
  end
  erase()
  shown = { buffer = buffer, row = row, column = column, text = text, to_row = to_row, to_column = to_column, item = item, taken = 0 }
  draw()
  keystroke.notify(buffer, 'textDocument/didShowCompletion', { item = item })
end

--- Request ghost text at the cursor.
function M.ask(buffer, invoked)
  keystroke.cancel(buffer, waiting)
  waiting = nil
  if not keystroke.config.ghost_text or vim.fn.pumvisible() == 1 or not keystroke.client(buffer) then
    return
  end
  local row, column = cursor()
  local tick = vim.api.nvim_buf_get_changedtick(buffer)
  waiting = keystroke.request(buffer, 'textDocument/inlineCompletion', {
    textDocument = { uri = vim.uri_from_bufnr(buffer) },
    position = { line = row, character = column },
    context = { triggerKind = invoked and 1 or 2 },
  }, function(problem, answer)
    require('keystroke.status').answered(buffer)
    local here_row, here_column = cursor()
    local moved = vim.api.nvim_get_current_buf() ~= buffer
      or vim.api.nvim_buf_get_changedtick(buffer) ~= tick
      or here_row ~= row
      or here_column ~= column
      or not vim.api.nvim_get_mode().mode:match('^i')
    if problem or moved then
      return
    end
    local items = answer and (answer.items or answer) or {}
    if items[1] then
      show(buffer, items[1])
    else
      M.clear()
    end
  end)
end

--- A key changed the text. If it matches the suggestion, the rest stays visible.
function M.typed(buffer)
  if shown and shown.buffer == buffer then
    local row, column = cursor()
    local typed = row == shown.row and column > shown.column and vim.api.nvim_get_current_line():sub(shown.column + 1, column)
    if typed and #typed < #shown.text and shown.text:sub(1, #typed) == typed then
      shown.text = shown.text:sub(#typed + 1)
      shown.to_column = shown.to_row == row and shown.to_column + #typed or shown.to_column
      shown.column = column
      draw()
    elseif row ~= shown.row or column ~= shown.column then
      M.clear()
    end
  end
  M.ask(buffer, false)
end

--- The cursor moved.
function M.moved()
  if shown then
    local row, column = cursor()
    local typed = row == shown.row and column > shown.column and vim.api.nvim_get_current_line():sub(shown.column + 1, column)
    local agrees = typed and shown.text:sub(1, #typed) == typed
    if not agrees and (row ~= shown.row or column ~= shown.column) then
      M.clear()
    end
  end
end

--- A larger model has revised the suggestion for this document.
function M.revised(uri)
  local buffer = vim.api.nvim_get_current_buf()
  if vim.uri_from_bufnr(buffer) == uri and vim.api.nvim_get_mode().mode:match('^i') then
    M.ask(buffer, false)
  end
end

local function piece(text, part)
  if part == 'word' then
    return text:match('^%s*[%w_]+') or text:match('^%s*[^%w_%s]+') or text
  elseif part == 'line' then
    return text:match('^\n?[^\n]*')
  end
  return text
end

--- Accept 'all' of it, its next 'word' or 'line'. Returns whether there was a suggestion.
function M.accept(part)
  if not M.visible() then
    return false
  end
  local it = shown
  local taken = piece(it.text, part)
  local whole = #taken == #it.text
  local lines = vim.split(taken, '\n', { plain = true })
  local row, column = it.row, it.column
  local to_row, to_column = row, column
  if whole then
    to_row, to_column = it.to_row, it.to_column
  end
  erase()
  vim.cmd('let &undolevels = &undolevels') -- an undo step of its own
  vim.api.nvim_buf_set_text(it.buffer, row, column, to_row, to_column, lines)
  local here = { row + #lines - 1, #lines == 1 and column + #taken or #lines[#lines] }
  vim.api.nvim_win_set_cursor(0, { here[1] + 1, here[2] })
  it.taken = it.taken + vim.fn.strchars(taken)
  if whole then
    shown = nil
    local command = it.item.command
    if command then
      keystroke.run(it.buffer, command.command, command.arguments)
    end
  else
    shown = vim.tbl_extend('force', it, {
      row = here[1],
      column = here[2],
      text = it.text:sub(#taken + 1),
      to_row = it.to_row + #lines - 1,
      to_column = it.to_row == row and it.to_column - column + here[2] or it.to_column,
    })
    draw()
    keystroke.notify(it.buffer, 'textDocument/didPartiallyAcceptCompletion', { item = it.item, acceptedLength = it.taken })
  end
  return true
end

return M
